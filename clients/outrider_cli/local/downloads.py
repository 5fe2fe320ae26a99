"""Downloads of models before services start: a service that downloads is silent, and its start would time out."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from outrider_cli.local.die_with_parent import die_with_parent


def download(models: Iterable[str], show: Callable[[str], None]) -> None:
    """Downloads those of the models that are names on the hub and not in its cache, one after the other.

    Ctrl-C ends it at once; another run goes on where it was. A model that cannot be had is left to the service, which
    says why.

    Args:
        models: As `outrider up` names them: demo names and folders need no download.
        show: Takes a line a second: the name, the bytes so far, all bytes, the rate.
    """
    for model in dict.fromkeys(models):
        if not (model.startswith(("demo/", "/", ".", "~")) or Path(model).is_dir()):
            _download(model, show)


def _download(model: str, show: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "outrider.models.hub.cache", model]
    child = subprocess.Popen(
        die_with_parent(command, ()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,  # Ctrl-C in the terminal reaches us alone
    )
    began = time.monotonic()
    try:
        for line in child.stdout or ():
            done, total = map(int, line.split())
            show(progress_line(model, done, total, time.monotonic() - began))
        child.wait()
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def progress_line(model: str, num_bytes: int, total: int, seconds: float) -> str:
    """Returns how far a download is, in words."""
    rate = f", {in_units(num_bytes / seconds)}/s" if num_bytes and seconds > 0 else ""
    return f"downloading {model}: {in_units(num_bytes)} of {in_units(total)}{rate}"


def in_units(num_bytes: float) -> str:
    """Returns a number of bytes as people read it: 16.4 GB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
