"""Started as root: put what bubblewrap will bind where an unprivileged user can reach it, become that user, go on.

An interpreter or a data directory often lies under a home directory of mode 700. In a mount namespace of our own each
source is bound below a fresh tmpfs; nothing changes outside. Standard library only; run with `python -I -S`.

Argument: JSON {"binds": {name: source}, "uid": int, "argv": [...]}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from producers.trials.sandboxes import kernel

#: Where the sources are bound, in the launcher's own mount namespace.
STAGE = "/tmp"


def main() -> None:
    """Bind, drop to `uid`, execute `argv`."""
    plan = json.loads(sys.argv[1])
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # Opened first: a source may itself lie below what is about to be covered.
    sources = {name: os.open(path, os.O_PATH | os.O_CLOEXEC) for name, path in plan["binds"].items()}
    kernel.mount("tmpfs", STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for name, fd in sources.items():
        target = Path(STAGE, name)
        target.mkdir()
        kernel.mount(f"/proc/self/fd/{fd}", str(target), None, kernel.MS_BIND | kernel.MS_REC)
    os.setgroups([])
    os.setresgid(plan["uid"], plan["uid"], plan["uid"])
    os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    os.chdir("/")
    os.execv(plan["argv"][0], plan["argv"])


if __name__ == "__main__":
    main()
