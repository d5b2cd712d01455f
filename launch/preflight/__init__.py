"""What the launch scripts check before anything starts; `python launch/preflight LAUNCHER ...` is their one program.

It imports neither torch nor DeepSpeed, so most answers take a fraction of a second; only what a DeepSpeed JSON says
and the options of launch/pretrain.py are judged by the package itself, in a process of its own: seconds, on a busy
machine up to a minute. `--help` needs Python alone.
"""
