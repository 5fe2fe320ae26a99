"""Models that a command is to start services with: which draft model goes with a target, and what is wrong with them.

They are judged, and downloaded, before any process starts: a service takes many seconds to find out, and one that
downloads is silent, so that its start would time out.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from outrider.core.devices import DEVICE_RULE, is_device
from outrider_cli.console import is_toy
from outrider_cli.failures import FlagError
from outrider_cli.local.die_with_parent import die_with_parent
from outrider_cli.local.process import ProcessFailed

DEMO_DRAFT = "demo/draft"
DRAFTLESS = (
    "no --draft: drafts come from retrieval alone; a small model with the same tokenizer, as --draft, can make it 2 to "
    "3 times as fast"
)
"""Printed if a user's own target has no draft model."""


def draft_for(target: str, draft: str | None) -> str | None:
    """Returns the draft model for a target: the one asked for; else the demo draft for a demo model, and none for any
    other model, as the demo draft's tokenizer fits no other."""
    return DEMO_DRAFT if draft is None and is_toy(target) else draft


def check_models(target: str, draft: str | None, device: str, flag: str = "--target") -> None:
    """Judges models by their names and files, in less than a second.

    Args:
        target: The target; or a draft model alone, if `flag` says so.
        draft: The draft model; None if there is none.
        device: What they are to run on.
        flag: Named where the target is wrong.

    Raises:
        FlagError: The device has no such name.
        ValueError: A model cannot be had, or the draft model does not fit. The message names the flag.
    """
    if not is_device(device):
        raise FlagError("--device", DEVICE_RULE, device)
    command = [sys.executable, "-m", "outrider.models.pairs", "--device", device, "--target", target]
    command += [] if draft is None else ["--draft", draft]
    judged = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if judged.returncode:
        last = (judged.stderr.strip().splitlines() or [f"exit status {judged.returncode}"])[-1]
        if last.startswith("ModuleNotFoundError"):
            return  # the service that loads it says which extra brings it
        raise ProcessFailed(f"the models cannot be looked at: {last}")
    if judged.stdout:
        raise ValueError(judged.stdout.strip().replace("--target ", f"{flag} "))


def download(models: Iterable[str], show: Callable[[str], None]) -> None:
    """Downloads those of the models that are names on the hub and not in its cache, one after the other.

    Ctrl-C ends it at once; another run goes on where it was. A model that cannot be had is left to the service, which
    says why.

    Args:
        models: As `outrider up` names them: demo names and folders need no download.
        show: Takes a line a second about how far the download is.
    """
    for model in dict.fromkeys(models):
        if not (model.startswith(("demo/", "/", ".", "~")) or Path(model).exists()):
            _download(model, show)


def _download(model: str, show: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "outrider.models.hub", model]
    child = subprocess.Popen(
        die_with_parent(command, ()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,  # Ctrl-C in the terminal reaches us alone
    )
    try:
        for line in child.stdout or ():
            show(line.rstrip())
        child.wait()
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
