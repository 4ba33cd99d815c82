"""SAY: what a run is, as frozen values; contradictions are refused while they are made.

``flags.py`` is the one table of flags; it drives the parser, ``--help`` and ``docs/flags.md``.  ``parse.py`` turns a
command line, ``MEGACKPT_ARGS`` and YAML files into a ``RunConfig``.  Nothing here imports torch.
"""
