"""Train a GPT model: `torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 12 ...` (`--help` lists the flags)."""

import sys

from megackpt.cli.train import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
