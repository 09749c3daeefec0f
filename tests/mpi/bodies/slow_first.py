"""The `sambasim` command, which rank 0 comes to later than the others."""

import os
import time

from sambasim.cli.main import main
from sambasim.runtime.launcher import launched_rank

if __name__ == "__main__":
    if launched_rank(os.environ) == 0:
        time.sleep(1)
    main()
