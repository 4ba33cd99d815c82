"""WATCH: what a run says about itself, to people, files and dashboards.

    record.py          one iteration's numbers, the value that everything below reads
    log_line.py        Megatron's log line from a record
    metrics.py         one JSON object per iteration
    writers.py         TensorBoard and Weights & Biases behind a guard (redaction.py: what they may see)
    throughput.py      tokens/s, TFLOP/s, MFU, HFU; gemm_rate.py measures a machine without a data sheet
    progress.py        time left
    memory_tracker.py  live and peak bytes of the tensors allocated inside a region
    plots.py           loss curve and memory per rank as self-contained SVG; report.py draws a run folder

Nothing here communicates between ranks: figures of other ranks come in as plain lists. Import the modules
directly; this package imports none, so that plotting and metrics do not pull in torch.
"""
