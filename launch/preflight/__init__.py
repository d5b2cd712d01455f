"""What the launch scripts check before anything starts; `python launch/preflight LAUNCHER ...` is their one program.

It imports neither torch nor DeepSpeed, so an answer takes a fraction of a second; only what a DeepSpeed JSON says is
judged by the package itself, in a process of its own.
"""
