"""Launch scripts are read without being run: what they start, with which flags, on how many ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt.config.errors import UsageError
from megackpt.config.launch_script import LaunchScript, parse_launch_script, read_launch_script
from megackpt.config.shell import Shell, statements


def read(text: str, **env: str) -> LaunchScript:
    return parse_launch_script(text, env, "run.sh")


def commands(text: str, **env: str) -> list[list[str]]:
    return list(statements(Shell(env), text))


ARRAYS = r"""
#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=4   # change me
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
SAVE=$1 #<where>
LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    # --master_addr $OLD
)
MODEL=(
    --num-layers 24
    --hidden-size ${HIDDEN:-1024}   # or (larger)
    "--split '99,1,0'"
)
if [[ "$WORLD_SIZE" -gt 8 ]]; then
    MODEL+=(--sequence-parallel)
else
    MODEL+=(--never)
fi
torchrun ${LAUNCH[@]} train/pretrain_gpt.py \
    ${MODEL[@]} \
    --save "$SAVE" --global-batch-size $((WORLD_SIZE * (3 + 1))) 2>&1 | tee log.txt
"""


def test_arrays_arithmetic_defaults_and_conditions() -> None:
    script = read(ARRAYS)
    assert script.program == "train/pretrain_gpt.py"
    assert script.world_size == 32
    words = ["--num-layers", "24", "--hidden-size", "1024", "--split", "'99,1,0'", "--sequence-parallel", "--save"]
    assert script.words == (*words, "", "--global-batch-size", "128")
    assert read(ARRAYS, HIDDEN="2048").words[3] == "2048"


def test_strings_over_lines_eval_case_and_a_launcher_in_a_variable() -> None:
    text = r"""
#SBATCH -N 2
SIZE=${1:-7B}
case $SIZE in
  7B)
    LAYERS=32 ;;
  13B|14B) LAYERS=40; EXTRA=1 ;;
  *) exit 1 ;;
esac
options=" \
    --num-layers ${LAYERS} \
    --save `pwd`/$(date +%H)
"
[ -z "$EXTRA" ] && options="$options --bf16"
[ -n "$EXTRA" ] || options+=" --swiglu"
cmd="python -u -m torch.distributed.launch --nproc_per_node 8 --nnodes $SLURM_NNODES pretrain_gpt.py $@ ${options}"
echo $cmd
eval $cmd
"""
    script = read(text)
    assert script.words == ("--num-layers", "32", "--save", "{pwd...}/{date...}", "--bf16", "--swiglu")
    assert script.world_size == 16
    assert script.notices == ()


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        ("torchrun --standalone --nproc-per-node=4", 4),
        ("python3 -m torch.distributed.run --nproc_per_node 2 --nnodes 3", 6),
        ("torchrun --nproc_per_node gpu", None),
        ("torchrun --nproc_per_node 8 --nnodes 1:4", None),
        ("srun --nodes=2 --ntasks-per-node=8 python", 16),
        ("srun -n 12 python -u", 12),
        ("deepspeed --num_gpus 8 --num_nodes 2", 16),
        ("python", 1),
    ],
)
def test_ranks(launch: str, ranks: int | None) -> None:
    assert read(f"{launch} pretrain_gpt.py --num_layers 2 &").world_size == ranks


def test_words_stay_together_where_the_shell_keeps_them_together() -> None:
    text = """A=("x y" z); B="p q"
run "${A[@]}" ${B} "$B" "" $NOTHING "${NONE[@]}" '$A' a\\ b "${#A[@]}" ${B%% *} ${B/p/r}"""
    assert commands(text) == [["run", "x y", "z", "p", "q", "p q", "", "$A", "a b", "2", "p", "r", "q"]]


def test_nothing_in_a_branch_that_is_not_taken() -> None:
    text = """
f() { echo hi; }
if false_thing; [ 1 -eq 2 ]; then A=1; elif [ "$X" = yes ] && [ 2 -gt 1 ]; then A=2; else A=3; fi
for i in 4 5; do B=$i; done
cat <<EOF > file
--num-layers 1 && A=9
EOF
show $A $B >> out 2>&1 < in
"""
    assert commands(text, X="yes")[-1] == ["show", "2", "4"]
    assert commands(text)[-1] == ["show", "3", "4"]


def test_what_nobody_set_is_named() -> None:
    script = read(
        'python pretrain_gpt.py --num-layers $LAYERS --data-path "$DATA" --lr ${LR:-1} --nnodes $SLURM_NNODES'
    )
    assert script.notices == ("run.sh: variables that are not set, read as empty: LAYERS, DATA",)


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "run.sh"
    path.write_text(f"touch {mark}\nX=$(touch {mark})\nY=`touch {mark}`\npython a.py --num-layers 1 $X $((1+1))\n")
    assert read_launch_script(str(path), {}).words == ("--num-layers", "1", "{touch...}", "2")
    assert not mark.exists()


def test_a_script_that_trains_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no command has --num-layers.*from outside: CONFIG"):
        read("source env.sh\npython train.py --config $CONFIG\n")
    with pytest.raises(UsageError, match="cannot be read"):
        read_launch_script("no/such/run.sh", {})
