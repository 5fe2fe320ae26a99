"""Settings of a service: one class each, read from flags and from OUTRIDER_* variables, flags first.

Every field has a description, which is its line in --help. Flags are the field names with dashes. The value of a field
with repr=False is never shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import CliApp, SettingsConfigDict, SettingsError

from outrider.core.devices import DEVICE_RULE, is_device
from outrider.security.settings import (
    ListenSecuritySettings,
    ListenTlsSettings,
    PeerSecuritySettings,
    checked_address,
)
from outrider.server.help import ALL, HELPS, help_of
from outrider.telemetry.redaction import without_secrets

MIN_NUM_BLOCKS = 8
"""Least blocks of a pool of keys and values: the measurements at the start need them."""
LISTEN = "Address to listen on, HOST:PORT; port 0 = any free port."

Settings = TypeVar("Settings", bound="ProcessSettings")


def model_config(package: str) -> SettingsConfigDict:
    """Returns the configuration of a settings class: the prefix of its variables, the shape of its flags."""
    return SettingsConfigDict(
        env_prefix=f"{package.replace('.', '_').upper()}_",
        cli_prog_name=f"python -m {package}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        # `parse_settings` prints errors: argparse would print them with the secrets that they quote.
        cli_exit_on_error=False,
        extra="forbid",
        frozen=True,
    )


class ProcessSettings(ListenTlsSettings):
    """Holds the settings of every process that serves, whatever its protocol."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Adds the variables' names to --help, which begins with the docstring."""
        super().__init_subclass__(**kwargs)
        if (config := cls.__dict__.get("model_config")) and cls.__doc__:
            prefix = config["env_prefix"]
            cls.__doc__ += f" Every flag is a variable, too: --log-level is {prefix}LOG_LEVEL. Flags come first."

    listen: str = Field("127.0.0.1:0", description=LISTEN)
    metrics_listen: str = Field("", description="Address for Prometheus, HOST:PORT; empty = none.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["text", "json"] = Field("text", description="Format of the log on stderr.")
    cpu: str = Field("", description="Cores to run on, like 0 or 2,3; empty = all.")
    drain_timeout_s: float = Field(
        30.0, ge=0, description="After SIGTERM, seconds that running calls may take to end; then they are cut off."
    )
    otlp_endpoint: str = Field(
        "",
        description="Collector of traces, OTLP over gRPC, like http://127.0.0.1:4317; empty = that of "
        "OTEL_EXPORTER_OTLP_ENDPOINT, if it is set.",
    )
    trace_ratio: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share recorded of the traces that begin here, 0 to 1, unless OTEL_TRACES_SAMPLER says it; what a "
        "caller has decided is followed.",
    )

    @field_validator("listen")
    @classmethod
    def _listen_is_an_address(cls, value: str) -> str:
        return checked_address(value)

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_listen_is_an_address(cls, value: str) -> str:
        return checked_address(value) if value else value

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp_endpoint_is_a_url(cls, value: str) -> str:
        if not value:
            return value
        try:
            # Checks the port too: urlsplit accepts any, and only `port` raises ValueError.
            url = urlsplit(value)
            is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            is_url = False
        if not is_url or url.path.strip("/") or url.query or url.fragment or "@" in url.netloc:
            raise ValueError("must be http://HOST:PORT or https://HOST:PORT, of an OTLP/gRPC collector")
        return value

    @field_validator("cpu")
    @classmethod
    def _cpu_is_a_list(cls, value: str) -> str:
        if not value:
            return value
        if not all(part.isdecimal() for part in value.split(",")):
            raise ValueError("must be core numbers separated by commas, like 0 or 2,3")
        if not hasattr(os, "sched_setaffinity"):
            raise ValueError("must be empty: this system does not let a process choose its cores")
        usable = os.sched_getaffinity(0)
        if not {int(part) for part in value.split(",")} <= usable:
            raise ValueError(f"must be among the cores that this process may use, {','.join(map(str, sorted(usable)))}")
        return value

    @property
    def cores(self) -> set[int]:
        """The cores of `cpu`; an empty set means all."""
        return {int(part) for part in self.cpu.split(",")} if self.cpu else set()


class ServiceSettings(ProcessSettings, ListenSecuritySettings):
    """Holds the settings of every gRPC service."""

    max_connection_age_s: float = Field(
        600.0,
        ge=0,
        description="After so many seconds a caller is asked to connect anew, by which it finds new replicas and shows "
        "a certificate that is valid now; calls that run go on. 0 = never.",
    )
    max_message_bytes: int = Field(4 << 20, ge=1024, description="Largest message accepted.")


class DialingSettings(ServiceSettings, PeerSecuritySettings):
    """Holds the settings of a service that dials peers."""


def draft_dtype_on(device: str) -> Literal["auto", "float32"]:
    """Returns the default dtype of a draft model: small models are fastest in float32 on a CPU; on other devices,
    reading the weights dominates their cost."""
    return "float32" if device == "cpu" else "auto"


class ModelSettings(DialingSettings):
    """Settings of a service that runs a model. `outrider.models.loading.load_for` loads the model."""

    model: str = Field("", description="Model: a demo name, a folder or a Hugging Face name.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Numbers of the model.")
    device: str = Field("cpu", description="Device of the model, like cpu or cuda:0.")
    num_threads: int = Field(0, ge=0, description="Threads of a forward on a CPU; 0 = one for each core in --cpu.")
    exact: Literal["auto", "off", "require"] = Field(
        "off", description="Whether the bits of a row may depend on what runs beside it."
    )
    graphs: bool = Field(
        True, description="Captures forwards on a GPU as graphs; without, its kernels are launched one by one."
    )
    kv_cache_tokens: int = Field(
        0,
        ge=0,
        description="Tokens whose keys and values the pool has room for; 0 = what half the free memory holds, or most "
        "of a GPU's.",
    )
    kv_block_size: int = Field(
        64, ge=64, multiple_of=64, description="Tokens of a block of the pool, the unit in which prefixes are shared."
    )
    prefix_scope: Literal["tenant", "global", "off"] = Field(
        "tenant", description="Who finds the keys and values of a prompt's beginning again: its tenant, all, nobody."
    )
    max_num_sessions: int = Field(64, ge=1, description="Most sessions at a time.")

    @field_validator("device")
    @classmethod
    def _device_is_one(cls, value: str) -> str:
        return checked_device(value)

    @model_validator(mode="after")
    def _pool_has_blocks(self) -> Self:
        check_pool("--kv-cache-tokens", self.kv_cache_tokens, self.kv_block_size)
        return self


def checked_device(value: str) -> str:
    """Returns the name of a torch device. Raises ValueError if it is not one."""
    if not is_device(value):
        raise ValueError(f"must be {DEVICE_RULE}")
    return value


def check_pool(flag: str, num_tokens: int, block_size: int) -> None:
    """Raises ValueError if a pool of this many tokens, the value of the flag, is too small. 0 means that the flag is
    unset."""
    least = MIN_NUM_BLOCKS * block_size
    if 0 < num_tokens < least:
        raise ValueError(
            f"{flag} must be 0 or at least {least}, {MIN_NUM_BLOCKS} blocks of --kv-block-size, got {num_tokens}"
        )


def parse_settings(cls: type[Settings], arguments: list[str] | None = None) -> Settings:
    """Reads settings from arguments (default: the command line) and the environment.

    --help ends the process with status 0. Wrong values end it with status 2 and one line for each, which names the flag
    and the rule. A line warns of an unknown variable: a misspelt one would be ignored silently.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if not {*HELPS}.isdisjoint(given):
        print(help_of(cls, is_whole=ALL in given))
        sys.exit(0)
    for warning in _misspelt(cls, os.environ):
        print(f"warning: {warning}", file=sys.stderr)
    if unknown := list(_unknown(cls, given)):
        for complaint in unknown:
            print(f"error: {complaint}", file=sys.stderr)
        sys.exit(2)
    try:
        return CliApp.run(cls, cli_args=given)
    except ValidationError as error:
        for item in error.errors():
            print(f"error: {_complaint(cls, item)}", file=sys.stderr)
    except SettingsError as error:
        print(f"error: {without_secrets(str(error).removeprefix('error parsing CLI: '))}", file=sys.stderr)
    sys.exit(2)


def _unknown(cls: type[ProcessSettings], arguments: Iterable[str]) -> Iterator[str]:
    """Yields an error for each unknown flag."""
    names = [name.replace("_", "-") for name in cls.model_fields]
    switches = [name.replace("_", "-") for name, field in cls.model_fields.items() if field.annotation is bool]
    known = [f"--{name}" for name in (*names, *(f"no-{name}" for name in switches))]
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            near = get_close_matches(flag, known, n=1, cutoff=0.75)
            yield f"there is no flag {flag}: " + (f"did you mean {near[0]}?" if near else "--help-all lists all")


def _complaint(cls: type[ProcessSettings], item: ErrorDetails) -> str:
    """Returns the flag, the rule, and the value unless it is secret."""
    # pydantic prefixes the message of a validator's ValueError with these words.
    rule = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return rule  # about several flags, which it names
    name = str(item["loc"][0])
    field = cls.model_fields.get(name)
    got = "" if field is not None and not field.repr else f", got {item.get('input')!r}"
    flag, variable = name.replace("_", "-"), f"{cls.model_config['env_prefix']}{name.upper()}"
    return without_secrets(f"--{flag} (or {variable}): {rule}{got}")


def _misspelt(cls: type[ProcessSettings], environment: Iterable[str]) -> Iterator[str]:
    """Yields a warning for each variable with this service's prefix that it does not have."""
    prefix = str(cls.model_config["env_prefix"])
    known = [f"{prefix}{name}".upper() for name in cls.model_fields]
    for name in sorted(map(str.upper, environment)):
        near = get_close_matches(name, known, n=1, cutoff=0.8 if name.startswith(prefix) else 0.95)
        if name in known or not (name.startswith(prefix) or (name.startswith("OUTRIDER_") and near)):
            continue
        advice = f"did you mean {near[0]}?" if near else "--help lists the flags, each of which is one"
        yield f"{name} is no variable of this service: {advice}"
