"""Flag table: logging, and the flags that are about the command line itself."""

from __future__ import annotations

from megackpt.config.flag import Flag, accept, later, works

LOGGING = "Logging, profiling"
RUNNING = "Command line"

_PROFILE = "profile from outside, with nsys or py-spy."

ROWS: tuple[Flag, ...] = (
    works(
        "--log-interval",
        LOGGING,
        "int",
        "logging.log_interval",
        "Iterations between two log lines.",
        minimum=1,
    ),
    works("--log-throughput", LOGGING, "switch", "logging.log_throughput", "Log TFLOP/s per GPU."),
    works(
        "--log-num-zeros-in-grad",
        LOGGING,
        "switch",
        "logging.log_num_zeros_in_grad",
        "Log zeros in the gradient.",
    ),
    works("--log-params-norm", LOGGING, "switch", "logging.log_params_norm", "Log the norm of the parameters."),
    works(
        "--tensorboard-dir",
        LOGGING,
        "text",
        "logging.tensorboard_dir",
        "TensorBoard folder.",
        metavar="FOLDER",
    ),
    works(
        "--wandb-project",
        LOGGING,
        "text",
        "logging.wandb_project",
        "Weights & Biases project.",
        metavar="NAME",
    ),
    works(
        "--wandb-exp-name",
        LOGGING,
        "text",
        "logging.wandb_exp_name",
        "Name of the run there.",
        metavar="NAME",
    ),
    works(
        "--metrics-file",
        LOGGING,
        "text",
        "logging.metrics_file",
        "JSON lines, one object per iteration.",
        metavar="FILE",
    ),
    works(
        "--memory-track-interval",
        LOGGING,
        "int",
        "logging.memory_track_interval",
        "Iterations between two measurements of peak activation bytes.",
        minimum=1,
        default="iteration 2 only",
    ),
    works(
        "--run-dir",
        LOGGING,
        "text",
        "logging.run_dir",
        "Folder for metrics.jsonl, loss.svg, memory.svg and config.yaml.",
        metavar="FOLDER",
    ),
    works(
        "--peak-tflops",
        LOGGING,
        "float",
        "logging.peak_tflops",
        "Dense peak of one device in TFLOP/s, for the logged MFU.",
        default="known devices only",
    ),
    accept("--tensorboard-queue-size", LOGGING, "int", "Changes nothing that is written."),
    accept("--log-validation-ppl-to-tensorboard", LOGGING, "switch", "Always written."),
    accept("--log-timers-to-tensorboard", LOGGING, "switch", "Iteration time and throughput are always written."),
    accept("--log-batch-size-to-tensorboard", LOGGING, "switch", "Always written."),
    accept("--log-memory-to-tensorboard", LOGGING, "switch", "Always written."),
    later("--log-optimizer-states-to-tensorboard", LOGGING, "switch"),
    later(
        "--tensorboard-log-interval",
        LOGGING,
        "int",
        "every logged iteration is written: use --log-interval.",
        "1",
    ),
    accept("--timing-log-level", LOGGING, "int", "There is one level of timing, the iteration."),
    later("--log-progress", LOGGING, "switch", "use --metrics-file."),
    later("--wandb-save-dir", LOGGING, "text", "use the environment variable WANDB_DIR."),
    later("--wandb-entity", LOGGING, "text", "use the environment variable WANDB_ENTITY."),
    later("--profile", LOGGING, "switch", _PROFILE),
    later("--profile-step-start", LOGGING, "int", _PROFILE),
    later("--profile-step-end", LOGGING, "int", _PROFILE),
    later("--profile-ranks", LOGGING, "many", _PROFILE),
    later("--record-memory-history", LOGGING, "switch", "use --memory-track-interval."),
    works(
        "--config",
        RUNNING,
        "text",
        None,
        "YAML file with the same names, flat or grouped; may be given again, later files win.",
        metavar="FILE",
        default="none",
    ),
    works("--print-config", RUNNING, "switch", None, "Print the run as YAML that --config reads back, and stop."),
    works(
        "--ignore-unsupported",
        RUNNING,
        "switch",
        None,
        "Run without the refused flags, with a warning for each, instead of stopping.",
    ),
    works("--help", RUNNING, "switch", None, "This page (also -h)."),
    accept("--local-rank", RUNNING, "int", "The rank comes from the launcher's environment."),
)
