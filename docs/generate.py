"""Pages that mkdocs makes of the code: flags, REST, gRPC, metrics, errors. Never written to disk.

mkdocs loads this file as a hook. What a page says is read from settings, routes, protos, registries
and the table of errors at every build, so that it cannot grow old.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from prometheus_client import CollectorRegistry

from graft.cli.flags import arguments_of
from graft.cli.plan import UpSettings
from graft.cli.service import settings_of
from graft.common.errors import TABLE, error_class, reason_name
from graft.draft.metrics import DraftMetrics
from graft.gateway.metrics import Metrics
from graft.gateway.rest import chat, completions, health, models, responses, tokenize
from graft.gateway.tree_counts import TreeCounts
from graft.verify.metrics import VerifyMetrics
from graft.verify.tally import Tally

ROOT = Path(__file__).resolve().parents[1]
PROTOS = ROOT / "protos" / "graft" / "v1"
_GENERATED = "*This page is made of the code when the documentation is built.*\n"

# Gauges of the gateway that are read from its replicas and sessions when scraped.
LEVELS = {
    "graft_kv_pages": "Pages of the KV pools, by `state`: free, used.",
    "graft_replicas": "Replicas by `state`, such as verify_up or draft_down.",
    "graft_spec_active": "Whether a proposer can draft, by `algorithm`.",
    "graft_choices": "Choices in the gateway, by `state`: in_flight, attended, closing.",
    "graft_tier_sessions": "Steered sessions by the `tier` in force.",
}

# For each reason: what has happened, and what to do about it.
ADVICE = {
    "invalid_argument": (
        "A field of the request, or a setting, has a value it may not have.",
        "The message names the field, what was expected and what came; `param` (REST) or "
        "`BadRequest` (gRPC) has the field alone.",
    ),
    "context_length_exceeded": (
        "Prompt and `max_tokens` together do not fit the model's context.",
        "Shorten the prompt or lower `max_tokens`; `/v1/models` tells `max_model_len`. Verify's "
        "`--context-length` may be set lower than what the model can.",
    ),
    "model_not_found": (
        "The request names a model that is not served, or a service cannot find its files.",
        "Ask `/v1/models` for the name. At start: `graft models list`, `graft models fetch NAME`, "
        "`graft models check PATH`.",
    ),
    "session_not_found": (
        "A drafter asked for a session that has ended or was never here.",
        "Nothing: it happens when a session ends while a drafter joins. If it goes on, drafter and "
        "gateway reach different verify replicas under one address.",
    ),
    "bad_ticket": (
        "A drafter showed a ticket that does not open the session.",
        "Look for a draft service that is not yours, or for two verify replicas behind one "
        "address: the gateway must name each by its own.",
    ),
    "overloaded": (
        "The queue is full: `--max-queue` of the gateway, or `--max-waiting` of verify.",
        "Wait for `retry-after` and ask again; official clients do. Add verify replicas, or raise "
        "the limits if waiting is better than refusing.",
    ),
    "draining": (
        "The server is shutting down and takes nothing new.",
        "Ask again after `retry-after`; another replica, or the restarted one, answers.",
    ),
    "mismatch": (
        "Two services do not fit: another tokenizer, model, precision or protocol revision.",
        "The message says what differs. `graft models check DRAFTER --target MODEL` finds it "
        "before anything is started.",
    ),
    "unknown_proposer": (
        "`speculation` names a proposer that no draft replica has.",
        "`/v1/models` lists the proposers; `--proposers` of `graft draft` loads them.",
    ),
    "no_replica": (
        "No verify replica can take the request: all are loading, stalled, or gone.",
        "`/ready` and `/server_info` say what each replica does. Ask again after `retry-after`.",
    ),
    "numeric": (
        "The target made logits that are not numbers.",
        "Check the weights with `graft models check`; try `--precision fp32`, or "
        "`--kernels torch`. Only the session that saw them ends.",
    ),
    "protocol": (
        "A peer sent messages out of order, or bytes that are no message.",
        "Services of one deployment should be of one version; a proxy between them must speak "
        "HTTP/2 from end to end.",
    ),
    "unsupported": (
        "The feature is known and not offered here, such as images in a message.",
        "Leave the field out. What is offered is in the REST and gRPC reference.",
    ),
    "stalled": (
        "A session, or verify's engine, made no progress in time.",
        "Look at verify's log for the step that does not end; `--progress-timeout-s` of the "
        "gateway and `--stall-s` of verify are the limits.",
    ),
    "unauthenticated": (
        "The API key is missing or wrong.",
        "Send `Authorization: Bearer KEY` with one of the gateway's `--api-keys`.",
    ),
    "internal": (
        "A defect: something happened that no code expected.",
        "The service's log has the traceback under the same request id. Please report it.",
    ),
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """mkdocs' hook: adds the pages."""
    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


def index_page() -> str:
    """The README, with links that lead within the site."""
    text = (ROOT / "README.md").read_text()
    text = text.replace("](docs/decisions)", "](decisions/README.md)").replace("](docs/", "](")
    text = text.replace("](deploy/README.md)", "](running.md)")
    return re.sub(
        r"\[([^]]+)\]\((?:LICENSE|CONTRIBUTING\.md|(?:deploy|examples)/[^)]*)\)", r"\1", text
    )


def running_page() -> str:
    """The page of deploy/, with links that lead within the site."""
    return (ROOT / "deploy" / "README.md").read_text().replace("](../docs/", "](")


def flags_page() -> str:
    """Every setting of every command."""
    lines = ["# Flags", "", _GENERATED]
    lines += [
        "A setting is a flag, a variable, or a key of its section in the file of `--config`; the "
        "first of these that has it wins.",
        "",
    ]
    for name in ("up", "gateway", "verify", "draft"):
        settings = UpSettings if name == "up" else settings_of(name)
        lines += [f"## graft {name}", "", "| flag | variable | default | what it does |"]
        lines += ["|---|---|---|---|"]
        for key, field in settings.listed().items():
            flag = arguments_of({key: "X"})[0].split("=")[0]
            default = field.get_default(call_default_factory=True)
            variable = f"`{settings.prefix()}{key.upper()}`"
            lines.append(
                f"| `{flag}` | {variable} | {_code(default)} | {_cell(field.description)} |"
            )
        lines.append("")
    return "\n".join(lines)


def rest_page() -> str:
    """Routes and bodies, from OpenAPI."""
    app = FastAPI(title="Graft")
    for part in (models, chat, completions, responses, tokenize, health):
        app.include_router(part.router)
    spec = app.openapi()
    lines = ["# REST API", "", _GENERATED, "A running gateway has it as `/openapi.json`.", ""]
    lines += ["| route | what it does | body |", "|---|---|---|"]
    for path, methods in spec["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = _type(body.get("schema", {})) if body else ""
            about = _cell(route.get("description", "").split("\n")[0])
            lines.append(f"| `{method.upper()} {path}` | {about} | {name} |")
    for name, schema in sorted(spec["components"]["schemas"].items()):
        if "properties" not in schema or name.startswith(("HTTPValidation", "Validation")):
            continue
        lines += ["", f"## {name}", "", _cell(schema.get("description", "")), ""]
        lines += ["| field | type | default |", "|---|---|---|"]
        required = set(schema.get("required", ()))
        for field, kind in schema["properties"].items():
            default = "required" if field in required else _code(kind.get("default"))
            lines.append(f"| `{field}` | {_type(kind)} | {default} |")
    return "\n".join(lines) + "\n"


def grpc_page() -> str:
    """Services and messages, from the proto files and their comments."""
    lines = ["# gRPC API", "", _GENERATED]
    lines += [
        "Clients speak `GatewayService`; the other files are what the services say to each other. "
        "The gateway answers reflection and `grpc.health.v1`.",
    ]
    paths = sorted(PROTOS.glob("*.proto"), key=lambda path: (path.stem != "gateway", path.stem))
    for path in paths:
        lines += ["", f"## {path.name}", ""]
        for kind, name, about, members in blocks(path.read_text()):
            lines += [f"### {name}", "", _cell(f"*{kind}.* {about}"), ""]
            if members:
                lines += ["| | type | what it is |", "|---|---|---|"]
                lines += [f"| `{word}` | `{of}` | {_cell(text)} |" for word, of, text in members]
                lines.append("")
    return "\n".join(lines) + "\n"


Member = tuple[str, str, str]


def blocks(text: str) -> Iterator[tuple[str, str, str, list[Member]]]:
    """Messages, enums and services of a proto file: kind, name, comment and members."""
    comment: list[str] = []
    name, kind, about, members, depth = "", "", "", list[Member](), 0
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        opened = re.match(r"(message|enum|service) (\w+) \{", line)
        if opened and depth == 0:
            kind, name, about, members = opened[1], opened[2], " ".join(comment), []
        elif depth and (member := _member(line)) is not None:
            members.append((*member, " ".join(comment)))
        depth += line.count("{") - line.count("}")
        if name and depth == 0:
            yield kind, name, about, members
            name = ""
        comment = []


def _member(line: str) -> tuple[str, str] | None:
    rpc = re.match(r"rpc (\w+)\((.*?)\) returns \((.*?)\)", line)
    if rpc:
        return rpc[1], f"{rpc[2]} → {rpc[3]}"
    field = re.match(r"((?:repeated |optional )?[\w.]+(?:<[\w., ]+>)?) (\w+) = \d+;", line)
    if field:
        return field[2], field[1]
    value = re.match(r"([A-Z][A-Z0-9_]+) = (\d+);", line)
    return (value[1], value[2]) if value else None


def metrics_page() -> str:
    """Every metric of every service."""
    gateway = Metrics().registry
    gateway.register(TreeCounts(lambda: []))
    verify = VerifyMetrics()
    zeros = ("running", "waiting", "free", "used", "cached", "dropped_streams")
    verify.attach(Tally(), lambda: dict.fromkeys(zeros, 0))
    lines = ["# Metrics", "", _GENERATED]
    lines += [
        "The gateway shows its own at `/metrics`; verify and draft at the port of "
        "`--metrics-port`. No label holds a text, an id or a name that a user chose. "
        "`deploy/monitoring` has a dashboard and alerts. The `vllm:` names are those that "
        "`vllm bench serve` reads.",
        "",
        "`graft_time_per_output_token_seconds` is (end - first token) / (tokens - 1) of a choice. "
        "A round commits several tokens at once, so the time between two events of a stream is no "
        "time per token.",
    ]
    for name, registry in (
        ("gateway", gateway),
        ("verify", verify.registry),
        ("draft", DraftMetrics().registry),
    ):
        lines += ["", f"## {name}", "", "| metric | kind | what it counts |", "|---|---|---|"]
        lines += _families(registry)
        if name == "gateway":
            lines += [f"| `{level}` | gauge | {about} |" for level, about in LEVELS.items()]
    return "\n".join(lines) + "\n"


def _families(registry: CollectorRegistry) -> Iterator[str]:
    for family in sorted(registry.collect(), key=lambda family: family.name):
        shown = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"| `{shown}` | {family.type} | {_cell(family.documentation)} |"


def errors_page() -> str:
    """Every reason, its codes on both surfaces, and what to do."""
    lines = ["# Troubleshooting by error code", "", _GENERATED]
    lines += [
        'Over REST an error is `{"error": {"message", "type", "param", "code"}}`; over gRPC it '
        "is a status with `google.rpc.ErrorInfo` (the reason), `BadRequest` (the field) and "
        "`RetryInfo`. Answers that asking again cannot mend carry `x-should-retry: false`.",
    ]
    for reason, row in TABLE.items():
        name = reason_name(reason)
        happened, remedy = ADVICE[name]
        again = "Asking again later may help." if row.retriable else "Asking again changes nothing."
        lines += [
            "",
            f"## {name}",
            "",
            f"HTTP {row.http} · gRPC {row.code.name} · type `{row.kind}`. "
            f"{error_class(reason).__doc__}",
            "",
            f"{happened} {again}",
            "",
            f"**What to do.** {remedy}",
        ]
    return "\n".join(lines) + "\n"


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_type(kind) for kind in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in schema
    ]
    return " ".join([str(schema.get("type", "any")), *bounds])


def _code(value: object) -> str:
    if value is None or value == "" or value == [] or value == {}:
        return ""
    return f"`{value}`".replace("|", "\\|")


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


PAGES: dict[str, Callable[[], str]] = {
    "index.md": index_page,
    "running.md": running_page,
    "reference/flags.md": flags_page,
    "reference/rest.md": rest_page,
    "reference/grpc.md": grpc_page,
    "reference/metrics.md": metrics_page,
    "reference/errors.md": errors_page,
}
