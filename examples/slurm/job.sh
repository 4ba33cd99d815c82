# shellcheck shell=bash
# What both job scripts share: where logs go, what is trained, and how a job that meets its time limit goes on.

# LOGS is the folder of this job's log files, one per rank. A requeued job keeps its number and its logs.
LOGS="runs/slurm/$SLURM_JOB_ID"
mkdir -p "$LOGS"
export LOGS
export PROCESSES_PER_NODE="${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds that torchrun waits for ranks which it told to end; 30 by itself

RUN="${RUN:-runs/gpt-7b}"        # checkpoints and metrics; the same folder every time, so that the job resumes
DATA="${DATA:-data/corpus}"      # prefix of a .bin/.idx pair made by tools/preprocess_data.py
TOKENIZER="${TOKENIZER:-data/tokenizer.model}"

# 7 billion parameters on 16 devices: tensor parallel inside a node, two pipeline stages, no data parallelism.
# Doubling the nodes doubles the data-parallel size; nothing else changes.
# shellcheck disable=SC2034
TRAINING=(
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel
    --recompute-granularity free
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 256 --train-iters 100000 --bf16
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95
    --data-path "$DATA" --split "989,10,1"
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 500 --exit-signal-handler
    --eval-interval 1000 --eval-iters 20 --log-interval 10 --log-throughput --run-dir "$RUN"
)

# Run a command in the background, so that this shell hears the signal which --signal=B:USR1@300 sends five minutes
# before the time limit. The ranks are then asked to save and end (--exit-signal-handler), and the job is requeued; the
# next start goes on from that checkpoint.
run_and_requeue() {
    local near=""
    trap 'near=1; echo "time limit is near: job $SLURM_JOB_ID saves and is requeued"
        scancel --signal=TERM "$SLURM_JOB_ID"' USR1
    "$@" &
    local step=$! status=0
    while kill -0 "$step" 2>/dev/null; do # a trapped signal ends `wait` early: wait again
        status=0
        wait "$step" || status=$?
    done
    [ -z "$near" ] || scontrol requeue "$SLURM_JOB_ID"
    return "$status"
}
