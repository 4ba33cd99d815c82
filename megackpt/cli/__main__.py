"""``python -m megackpt.cli COMMAND ...``, the same as the ``megackpt`` command; torchrun takes it with ``-m``."""

import sys

from megackpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
