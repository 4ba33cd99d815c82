#!/usr/bin/env bash
# From a fresh clone to a trained model in one command: environment, corpus, tokenizer, a run in two dimensions of
# model parallelism with recomputation, a resumed run, a folder with its curves, and a text that the model continues.
#
#   bash examples/quickstart.sh                    the sources of Python's standard library as text
#   bash examples/quickstart.sh --text book.txt    your own UTF-8 text
#
#   --out DIR      where everything goes (default runs/quickstart); the run in it is trained afresh each time
#   --no-install   use the python on PATH as it is, for example inside a container
set -euo pipefail

root="$(cd "$(dirname "$0")/.." && pwd)"
out="$root/runs/quickstart" text="" install=yes
while [ $# -gt 0 ]; do
    case "$1" in
        --text) text="$(realpath "${2:?--text needs a file}")"; shift 2 ;;
        --out) out="$(realpath -m "${2:?--out needs a folder}")"; shift 2 ;;
        --no-install) install=no; shift ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
        *) echo "quickstart.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
    esac
done
if [ -n "$text" ] && [ ! -r "$text" ]; then
    echo "quickstart.sh: cannot read $text" >&2
    exit 2
fi
# The vocabulary fits the text: too many pieces for little text would each be seen a few times only.
bytes=4000000 vocabulary=2048
if [ -n "$text" ]; then
    bytes="$(wc -c <"$text")"
    if [ "$bytes" -lt 100000 ]; then
        echo "quickstart.sh: $text has $bytes bytes; a model needs at least 100000 to learn from" >&2
        exit 2
    fi
    if [ "$bytes" -lt 1000000 ]; then vocabulary=512; fi
fi

cd "$root"

say() { printf '\n== %s\n' "$*"; }

say "1/6 environment"
python=python3
if [ "$install" = yes ]; then
    # shellcheck source=tools/venv.sh
    . tools/venv.sh
    ensure_venv
    python="$PWD/.venv/bin/python"
fi
"$python" -c 'import sys, torch; print(f"Python {sys.version.split()[0]}, torch {torch.__version__}")'

# One thread per process: four processes share the cores, and results do not depend on how many there are.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false

say "2/6 text, tokenizer, tokens"
data="$out/data"
mkdir -p "$data"
# What was made from the same text is used again: it is the same to the byte.
wanted="$(cat examples/quickstart.sh requirements.lock ${text:+"$text"} | sha256sum)"
if [ "$(cat "$data/made-from" 2>/dev/null)" != "$wanted" ]; then
    rm -f "$data/made-from"
    "$python" tools/build_corpus.py --output "$data/corpus.jsonl" --max-bytes 4000000 ${text:+--text "$text"}
    "$python" tools/train_tokenizer.py --input "$data/corpus.jsonl" --vocab-size "$vocabulary" \
        --output "$data/tokenizer.model"
    "$python" tools/preprocess_data.py --input "$data/corpus.jsonl" --output-prefix "$data/corpus" --append-eod \
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$data/tokenizer.model"
    echo "$wanted" >"$data/made-from"
else
    echo "already there: $data"
fi
"$python" tools/corpus_entropy.py "$data/corpus_text_document"
entropy="$("$python" tools/corpus_entropy.py --number-only "$data/corpus_text_document")"

say "3/6 training"
gpus=0
if command -v nvidia-smi >/dev/null; then
    gpus="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
fi
tensor=2 pipeline=2 precision=fp32
if [ "$gpus" -gt 0 ]; then
    precision=bf16
    if [ "$gpus" -lt 4 ]; then pipeline=1; fi
    if [ "$gpus" -lt 2 ]; then tensor=1; fi
fi
processes=$((tensor * pipeline))
device="CPU processes"
if [ "$gpus" -gt 0 ]; then device="of $gpus GPUs"; fi
echo "$processes $device: tensor parallel $tensor x pipeline parallel $pipeline, sequence parallel, selective recompute"

iterations=120 more=20
run="$out/run"
rm -rf "$run/checkpoints" "$run/metrics.jsonl"
# core_attn, the default of selective, pays with the unfused core, which stores s x s matrices; fused attention
# rebuilds them anyway.
flags=(
    --tensor-model-parallel-size "$tensor" --pipeline-model-parallel-size "$pipeline" --sequence-parallel
    --recompute-granularity selective --attention-backend unfused
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --hidden-dropout 0 --attention-dropout 0 --params-dtype "$precision"
    --micro-batch-size 8 --global-batch-size 32
    --train-iters "$((iterations + more))" --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters 10
    --data-path "$data/corpus_text_document" --split "90,10,0"
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$data/tokenizer.model"
    --save "$run/checkpoints" --load "$run/checkpoints" --save-interval "$iterations"
    --eval-interval 60 --eval-iters 8 --log-interval 5 --log-throughput --run-dir "$run"
)
train() {
    "$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$processes" \
        pretrain_gpt.py "${flags[@]}" "$@"
}
train --exit-interval "$iterations"

say "4/6 resuming from the checkpoint, in new processes, for $more more iterations"
train

say "5/6 report"
"$python" tools/plot_run.py "$run" --reference-loss "$entropy" --reference-label "unigram entropy" >/dev/null
"$python" - "$run" "$entropy" <<'PYTHON'
import json
import sys
from pathlib import Path

run, entropy = Path(sys.argv[1]), float(sys.argv[2])
records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
training = [record for record in records if "lm_loss" in record]
validation = [record["valid_loss"] for record in records if "valid_loss" in record]
loss = validation[-1]
print(f"iterations        {training[0]['iteration']} to {training[-1]['iteration']}")
print(f"training loss     {training[0]['lm_loss']:.3f} -> {training[-1]['lm_loss']:.3f}")
print(f"validation loss   {loss:.3f}")
print(f"unigram entropy   {entropy:.3f}   (the best that a model which sees no context can reach)")
for path in ("metrics.jsonl", "loss.svg", "memory.svg", "config.yaml", "checkpoints"):
    print(f"{'':18}{run / path}")
if not loss < entropy:
    sys.exit("the validation loss is not below the unigram entropy: the model has not learnt to use context")
print("the model uses context: its validation loss is below the unigram entropy")
PYTHON

say "6/6 the model goes on with a text"
prompt="def __init__(self"
if [ -n "$text" ]; then prompt="$(head -c 2000 "$text" | tr '\n' ' ' | cut -d' ' -f1-6)"; fi
"$python" -m megackpt.cli generate --load "$run/checkpoints" --prompt "$prompt" --num-tokens 60 --temperature 0.7 --top-p 0.9
