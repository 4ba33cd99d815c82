"""Split: tensor-parallel layers and their communication, each a plain function or module over an axis value."""
