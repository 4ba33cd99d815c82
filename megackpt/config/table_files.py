"""Flag table: data and checkpoint files."""

from __future__ import annotations

from megackpt.config.data import TOKENIZERS
from megackpt.config.flag import Flag, accept, later, works

DATA = "Data, tokenizer"
FILES = "Checkpoint files"

_SPLIT = "use --data-path and --split."
_TOKENIZER = "use a SentencePiece model: --tokenizer-type SentencePieceTokenizer --tokenizer-model FILE."

ROWS: tuple[Flag, ...] = (
    works(
        "--data-path",
        DATA,
        "many",
        "data.data_path",
        "Prefix of a .bin/.idx pair, or weights and prefixes in turn: 0.7 a 0.3 b.",
        metavar="PREFIX ...",
        default="none",
    ),
    works("--split", DATA, "text", "data.split", "Shares of training, validation and test; any numbers."),
    works("--tokenizer-type", DATA, "text", "data.tokenizer_type", "Kind of tokenizer.", choices=TOKENIZERS),
    works("--tokenizer-model", DATA, "text", "data.tokenizer_model", "File of the tokenizer.", metavar="FILE"),
    works(
        "--data-cache-path",
        DATA,
        "text",
        "data.data_cache_path",
        "Folder of the sample indices.",
        metavar="FOLDER",
        default="beside the data",
    ),
    works(
        "--mock-data",
        DATA,
        "switch",
        "data.mock_data",
        "Made-up samples that can be learnt; needs --vocab-size.",
    ),
    works(
        "--num-workers",
        DATA,
        "int",
        "data.num_workers",
        "Background readers per process; 0 reads in the training thread. Never changes the order.",
        minimum=0,
    ),
    works("--eod-mask-loss", DATA, "switch", "data.eod_mask_loss", "The loss skips end-of-document tokens."),
    accept("--no-create-attention-mask-in-dataloader", DATA, "switch", "The loader never makes one."),
    accept("--no-mmap-bin-files", DATA, "switch", "Changes no result."),
    later("--train-data-path", DATA, "many", _SPLIT),
    later("--valid-data-path", DATA, "many", _SPLIT),
    later("--test-data-path", DATA, "many", _SPLIT),
    later("--vocab-file", DATA, "text", _TOKENIZER),
    later("--merge-file", DATA, "text", _TOKENIZER),
    later("--tokenizer-name-or-path", DATA, "text", _TOKENIZER),
    later("--data-impl", DATA, "text", "datasets are .bin/.idx pairs: leave it out.", "mmap", "infer"),
    later("--dataloader-type", DATA, "text", "samples come in one fixed order: leave it out.", "single"),
    later("--reset-attention-mask", DATA, "switch"),
    later("--reset-position-ids", DATA, "switch"),
    works("--save", FILES, "text", "checkpoint.save", "Folder to write checkpoints to.", metavar="FOLDER"),
    works(
        "--save-interval",
        FILES,
        "int",
        "checkpoint.save_interval",
        "Iterations between two saves.",
        minimum=1,
        default="only at the end",
    ),
    works(
        "--load",
        FILES,
        "text",
        "checkpoint.load",
        "Folder to continue from; an empty one starts afresh.",
        metavar="FOLDER",
    ),
    works("--no-save-optim", FILES, "switch", "checkpoint.save_optim", "Save no optimizer state.", const=False),
    works("--no-save-rng", FILES, "switch", "checkpoint.save_rng", "Save no random states.", const=False),
    works("--no-load-optim", FILES, "switch", "checkpoint.load_optim", "Load no optimizer state.", const=False),
    works("--no-load-rng", FILES, "switch", "checkpoint.load_rng", "Load no random states.", const=False),
    accept("--ckpt-fully-parallel-load", FILES, "switch", "Changes no result."),
    accept("--ckpt-assume-constant-structure", FILES, "switch", "Changes no result."),
    accept("--use-persistent-ckpt-worker", FILES, "switch", "Changes no result."),
    later("--ckpt-format", FILES, "text", "checkpoints are torch.distributed.checkpoint folders.", "torch_dist"),
    later("--auto-detect-ckpt-format", FILES, "switch", "checkpoints are torch.distributed.checkpoint folders."),
    later("--use-checkpoint-args", FILES, "switch", "use --config with the config.yaml of the run."),
    later("--exit-on-missing-checkpoint", FILES, "switch"),
    later("--pretrained-checkpoint", FILES, "text", "use --load with --finetune."),
    later("--async-save", FILES, "switch", "saves are synchronous."),
    later("--dist-ckpt-strictness", FILES, "text", "a missing or unexpected tensor is always an error."),
    later("--save-retain-interval", FILES, "int"),
)
