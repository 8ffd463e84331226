"""The simulated plant, its theory, and the `twin` command line.

May live here: SimPy processes for AFD bundles (later engines, pools and links), closed forms that predict what they do,
scenarios, sweeps and the commands. Anything printed from here is simulated or computed, and says so.
May not: torch. `live` and `kernels` are reached only inside the command that needs them.
"""

__version__ = "0.1.0"
