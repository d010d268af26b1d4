"""A draft replica: proposers, engine, links and the gRPC server that gateways speak to."""

from __future__ import annotations

import asyncio
import difflib
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from graft.common import log, metrics
from graft.common.channel import DRAFT_MESSAGE_BYTES, open_channel
from graft.common.errors import Draining, InvalidArgument, Stalled
from graft.common.server import GrpcServer
from graft.common.tracing import OFF, Tracing, open_tracing
from graft.draft.asking import asking
from graft.draft.engine import Engine
from graft.draft.events import Outcome
from graft.draft.link import Pairing
from graft.draft.links import Links
from graft.draft.loading import MODEL_PROPOSERS, ModelLoader
from graft.draft.metrics import DraftMetrics
from graft.draft.pairing import hello_of
from graft.draft.proposers.base import Proposer, ProposerInfo
from graft.draft.proposers.merged import MergedProposer
from graft.draft.proposers.ngram import NgramProposer
from graft.draft.roster import Office
from graft.draft.service import DraftService, Parts
from graft.draft.settings import DraftSettings
from graft.draft.traced import SessionSpans
from graft.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server

_log = log.get("server")
_SERVICE = "graft.v1.DraftService"
_ENGINE_STOP_S = 1.0
_WATCH_MAX_S = 1.0

MERGED = MergedProposer.name
PROPOSERS = ("ngram", *MODEL_PROPOSERS, MERGED)


def make_proposers(settings: DraftSettings) -> list[Proposer]:
    """The proposers that the settings name, in that order.

    Raises:
        InvalidArgument: a name is unknown or given twice.
        ModelNotFound, Unsupported, Mismatch: a checkpoint cannot be used.
    """
    made: dict[str, Proposer] = {}
    models = ModelLoader(settings)
    ngram = NgramProposer(settings.ngram)
    asked: list[str] = []
    for word in settings.proposers:
        name, _, path = word.partition("=")
        if name not in PROPOSERS:
            close = difflib.get_close_matches(name, PROPOSERS, n=1) or PROPOSERS
            raise InvalidArgument(
                f"unknown proposer {name!r}; did you mean {close[0]}?", field="proposers"
            )
        if name in {one.partition("=")[0] for one in asked}:
            raise InvalidArgument(f"proposer {name} is named twice", field="proposers")
        asked.append(word)
        if name == MERGED:
            sources = _merged_models(path, settings.proposers)
            for source in sources:
                if source not in made:
                    made[source] = models.load(source, _path_of(source, settings.proposers))
            made[MERGED] = MergedProposer(ngram, *(made[source] for source in sources))
        elif name == "ngram":
            made[name] = ngram
        elif name not in made:
            made[name] = models.load(name, path)
    return [made[word.partition("=")[0]] for word in asked]


def _merged_models(sources: str, words: Sequence[str]) -> list[str]:
    """The models that merged trees are made with, of ``eagle3+ngram``, or the first one loaded.

    Raises:
        InvalidArgument: there is none, or more than two.
    """
    names = [name for name in sources.split("+") if name and name != "ngram"]
    if not sources:
        listed = [word.partition("=")[0] for word in words]
        names = [name for name in listed if name in MODEL_PROPOSERS][:1]
    if not 1 <= len(set(names)) == len(names) <= 2 or not set(names) <= set(MODEL_PROPOSERS):
        raise InvalidArgument(
            f"merged takes ngram and one or two of {', '.join(MODEL_PROPOSERS)}, for example "
            f"merged=eagle3+ngram, not {sources or 'nothing'!r}",
            field="proposers",
        )
    return names


def _path_of(name: str, words: Sequence[str]) -> str:
    """The checkpoint that a proposer is given by name=PATH; empty without one."""
    paths = (word.partition("=") for word in words)
    return next((path for known, _, path in paths if known == name), "")


def _described(proposer: Proposer, lookahead: int) -> ProposerInfo:
    """What the proposer says of itself, with the look-ahead of its default tier filled in."""
    info = proposer.describe()
    if not lookahead:
        return info
    if not info.foresees:
        reason = "it works from committed prefixes alone"
        _log.warning(
            "setting is inactive", setting="lookahead", proposer=proposer.name, reason=reason
        )
        return info
    return replace(info, default_tier=replace(info.default_tier, lookahead=lookahead))


class DraftServer:
    """`start` makes everything and listens; `stop` drains, refuses what is left and ends.

    `proposers` takes the place of those that the settings name.
    """

    def __init__(
        self, settings: DraftSettings, proposers: Sequence[Proposer] | None = None
    ) -> None:
        self._settings = settings
        chosen = make_proposers(settings) if proposers is None else proposers
        self._proposers = {proposer.name: proposer for proposer in chosen}
        self._infos = asking(
            {name: _described(one, settings.lookahead) for name, one in self._proposers.items()},
            settings,
        )
        self._hello = hello_of(self._infos.values(), secrets.randbits(64) or 1)
        self.metrics = DraftMetrics()
        self._server: GrpcServer | None = None
        self._tracing: Tracing = OFF

    @property
    def num_sessions(self) -> int:
        """Sessions attended now."""
        return self._links.num_sessions

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no session is attended; False when some still are after `timeout_s`."""
        return await self._links.wait_empty(timeout_s)

    async def start(self) -> int:
        """Starts the engine and the server; returns the port.

        Raises:
            InvalidArgument: the port is in use, or plain text was asked for beyond loopback.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        tls = settings.tls

        def deliver(outcomes: Sequence[Outcome]) -> None:
            # The engine may finish a batch after the loop has gone.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._links.deliver, outcomes)

        self._tracing = open_tracing("draft", settings.otlp_endpoint, rounds=settings.trace_rounds)
        spans = SessionSpans(self._tracing)
        self._engine = Engine(self._proposers, deliver, self.metrics)
        self._links = Links(
            Pairing(
                hello=self._hello,
                open_channel=lambda address: open_channel(
                    address, tls=tls, plaintext_ok=settings.insecure
                ),
                connect_timeout_s=settings.connect_timeout_s,
            ),
            Office(infos=self._infos, engine=self._engine, metrics=self.metrics, spans=spans),
        )
        self._service = DraftService(
            Parts(
                hello=self._hello,
                infos=self._infos,
                links=self._links,
                engine=self._engine,
                metrics=self.metrics,
                max_sessions=settings.max_sessions,
                spans=spans,
            )
        )
        server = GrpcServer(
            [_SERVICE], tls=tls, plaintext_ok=settings.insecure, message_bytes=DRAFT_MESSAGE_BYTES
        )
        add_DraftServiceServicer_to_server(self._service, server.server)
        self._serve_metrics()
        port = await server.start(settings.host, settings.port)
        self._server = server
        self._engine.start()
        await server.set_serving(True)
        self._watcher = asyncio.create_task(self._watch(server), name="draft-watch")
        _log.info("listening", host=settings.host, port=port, proposers=list(self._infos))
        if settings.threads > 1 and set(self._infos) == {"ngram"}:
            _log.warning("setting is inactive", setting="threads", reason="only ngram is loaded")
        return port

    async def _watch(self, server: GrpcServer) -> None:
        """While the engine is stuck: NOT_SERVING, and every session goes to another drafter."""
        stall_s = self._settings.stall_s
        stalled = False
        while True:
            await asyncio.sleep(min(stall_s / 4, _WATCH_MAX_S))
            if (self._engine.working_s > stall_s) is stalled:
                continue
            stalled = not stalled
            await server.set_serving(not stalled)
            if stalled:
                error = Stalled(f"a proposer has not returned for {stall_s:g} s")
                _log.warning("engine stalled", sessions=self.num_sessions)
                self._service.unwilling = error
                self._links.refuse_all(error)
            else:
                _log.info("engine recovered")
                self._service.unwilling = None

    def _serve_metrics(self) -> None:
        host, port = self._settings.host, self._settings.metrics_port
        try:
            metrics.serve(self.metrics.registry, host, port)
        except OSError as error:
            raise InvalidArgument(
                f"cannot serve metrics on {host}:{port}: {error.strerror}", field="metrics_port"
            ) from error

    async def stop(self, grace_s: float) -> None:
        """Refuses new sessions, waits up to `grace_s` for the old ones, then ends."""
        server, self._server = self._server, None
        if server is None:
            return
        self._watcher.cancel()
        self._service.unwilling = Draining("the draft service is shutting down")
        await server.set_serving(False)
        deadline = time.monotonic() + grace_s
        await self.wait_idle(grace_s)
        await self._links.close()
        self._service.end_streams()
        await server.stop(max(0.1, deadline - time.monotonic()))
        if not await asyncio.to_thread(self._engine.stop, _ENGINE_STOP_S):
            _log.warning("proposer did not return", waited_s=_ENGINE_STOP_S)
        await asyncio.to_thread(self._tracing.close)
