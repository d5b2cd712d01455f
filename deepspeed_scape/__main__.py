"""``python -m deepspeed_scape`` alone: which commands there are."""

import sys

from deepspeed_scape.run import USAGE

COMMANDS = f"""deepspeed_scape: name one of its commands
{USAGE}
       python -m deepspeed_scape.plan | universal | export  --help"""

if __name__ == "__main__":
    print(COMMANDS, file=sys.stderr)
    sys.exit(2)
