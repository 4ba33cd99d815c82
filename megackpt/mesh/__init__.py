"""Who: rank arithmetic, process groups, launch environment, the device seam, the parameter record.

Import from the modules: `layout` and `launch` need no torch, and the parser of the command line uses them.
"""
