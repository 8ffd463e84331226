"""A model that vLLM runs in this process or in its server, for `twin validate --engine vllm`."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from latency_models.timed_runs import ProfiledRounds, ReplayedRun
from live.clock import DirectClock
from live.device import device_name, versions
from live.engine import Clock, Progress, Watch
from live.generation import Generation
from live.validation.backend import IN_TURNS_SEED, Requests, WithoutDrafts, clients_of, profiling_limits, replay
from live.validation.profiling import EngineProfile
from live.vllm.server import MODEL, ServerProfile, VllmServer, replay_served
from live.vllm.settings import SECTION
from live.vllm.step_log import UNKNOWN, ScheduledStep
from scenarios.engine import SchedulerPlan
from scenarios.validation import ProfilingSpec, ValidationScenario
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.engine_config import NULL_BLOCKS, EngineConfig
from schedulers.sequence import Sequence
from schedulers.step_policies import ChunkPolicy
from workloads.errors import BadInput
from workloads.json_files import read_json_object


class ProcessClock(DirectClock):
    """`DirectClock` over the CPU time of all threads, for an engine that computes on one but has others beside it."""

    def elapsed(self) -> float:
        return time.process_time()


class VllmEngine:
    """One `LLMEngine` of vLLM, whose scheduler is one of `live.vllm.schedulers`, as a `TimedEngine`.

    A step lasts from the end of the step before, or from the first request of an idle engine, to its output's end.
    """

    clock: Clock
    watch: Watch | None
    attention_block: int = 0

    def __init__(self, llm: Any, block_size: int) -> None:
        self.clock = time.perf_counter
        self.watch = None
        self.keep_times = False
        self.sequences: dict[int, Sequence] = {}
        self.block_size = block_size
        self._llm = llm
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._steps = deque[ScheduledStep]()
        self._scheduler.watch = self._steps.append
        self._count = 0
        self._begin: float | None = None  # of the next step; None: the engine is idle

    def share_weights(self, engine: VllmEngine) -> None:
        """Compute with another engine's weights: where these lie in memory, steps differ by up to 15 %."""
        own, others = (
            each._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
            for each in (self, engine)
        )
        own.model = others.model

    def reset(self, chunk_policy: ChunkPolicy | None = None) -> None:
        """Forget the prefix cache, and take another chunk policy. The engine must have no requests."""
        assert not self.sequences, "an engine with requests cannot be reset"
        self.step()
        self._llm.reset_prefix_cache()
        self._scheduler.chunk_policy = chunk_policy
        self.watch = None
        self.keep_times = False
        self._begin = None

    def submit(self, generation: Generation) -> Sequence:
        """Add a request. Raises ValueError for one that vLLM refuses."""
        request = generation.request
        begin = self.clock()
        sequence = Sequence(request, self._count, one_shot=False)
        sequence.payload = generation
        self._count += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=max(request.max_tokens, 1), ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = {"prompt_token_ids": generation.prompt.tolist()}
        self._llm.add_request(str(request.id), prompt, params, priority=request.priority)
        self.sequences[request.id] = sequence
        if self._begin is None:
            self._begin = begin
        return sequence

    def step(self) -> Progress | None:
        """Let vLLM run a step; None when there is nothing to run."""
        while self._llm.has_unfinished_requests() or self._llm.engine_core.engine_core.batch_queue:
            outputs = self._llm.step()
            if self._steps:
                return self._finish(self._steps.popleft(), outputs)
        if self._scheduler.has_finished_requests():  # the runner frees their states in an empty step
            self._llm.step()
        return None

    def abort(self, request_id: int) -> None:
        del self.sequences[request_id]
        self._llm.abort_request([str(request_id)])

    def _finish(self, step: ScheduledStep, outputs: list[Any]) -> Progress:
        """Write the outputs of a step to their generations."""
        end = self.clock()
        finished = []
        batch = self._batch(step)
        for output in outputs:
            sequence = self.sequences.get(int(output.request_id))
            if sequence is None:
                continue
            generation = sequence.payload
            assert isinstance(generation, Generation)
            tokens = output.outputs[0].token_ids
            one_shot = not generation.request.max_tokens  # vLLM runs it for one token, which the request does not have
            if generation.first_token < 0 and tokens:
                generation.first_token = end
                sequence.num_cached_tokens = output.num_cached_tokens or 0
            if not one_shot:
                generation.output.extend(tokens)
            if self.keep_times and not one_shot:
                generation.times.extend([end] * len(tokens))
            if output.finished:
                generation.last_token = end
                generation.finish_reason = "length"
                finished.append(generation)
                del self.sequences[generation.request.id]
        assert self._begin is not None
        if self.watch is not None:
            self.watch(batch, self._begin, end)
        self._begin = end if self.sequences else None
        return Progress([], finished)

    def _batch(self, step: ScheduledStep) -> Batch:
        """The step as the twin's latency models see it."""
        decodes = [self._sequence(request_id) for request_id in step.decodes]
        chunks = [Chunk(self._sequence(row.request_id), row.tokens, row.context, row.last) for row in step.chunks]
        kind = MixedBatch if chunks else DecodeBatch
        return kind(chunks, decodes, step.decode_kv, step.longest_decode)

    def _sequence(self, request_id: str) -> Sequence:
        """The sequence of vLLM's internal request id, `number-suffix`; a placeholder for one that was aborted."""
        return self.sequences.get(int(request_id.partition("-")[0]), UNKNOWN)


class VllmBackend(WithoutDrafts):
    """One model in vLLM's engine, timed by CPU time, started when it first runs; `BadInput` for what vLLM refuses."""

    def __init__(self, scenario: ValidationScenario, base: Path, device: str = "cpu") -> None:
        self._scenario = scenario
        self._device = device
        self._base = base
        self._engine: VllmEngine | None = None
        self._profile_in_turns: EngineProfile | None = None
        self._vocabulary = 0

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfiledRounds:
        """Time steps of random requests (`live.validation.profiling`), without a chunk policy."""
        engine = self._settled(scheduler, None)
        limits = profiling_limits(scheduler, spec)
        return EngineProfile(engine, limits, self._vocabulary, seed, ProcessClock()).run()

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayedRun:
        """Send each request to an empty engine at its arrival time, and turns of sessions after their answers.

        With `profiling.in_turns`, a second engine is profiled in turns with it.
        """
        engine = self._settled(scheduler, scheduler.chunk_policy())
        spec = self._scenario.profiling
        if spec.in_turns and self._profile_in_turns is None:
            limits = profiling_limits(scheduler, spec)
            beside = self._start(scheduler)
            beside.share_weights(engine)
            self._profile_in_turns = EngineProfile(beside, limits, self._vocabulary, IN_TURNS_SEED, ProcessClock())
        clients = clients_of(requests, self._vocabulary, scheduler.config.prefix_id_tokens)
        return replay(engine, clients, ProcessClock(), self._profile_in_turns)

    def describe(self) -> dict[str, Any]:
        """The device, the dtype and the versions of the packages."""
        return {
            "device": device_name(self._device), "dtype": self._scenario.model.dtype, "engine": "vllm",
            "versions": versions() | {"vllm": vllm.__version__},
        }  # fmt: skip

    def close(self) -> None:
        """Nothing: the engine is in this process."""

    def _settled(self, scheduler: SchedulerPlan, chunk_policy: ChunkPolicy | None) -> VllmEngine:
        """The engine without requests and cached prefixes."""
        if self._engine is None:
            self._engine = self._start(scheduler)
        self._engine.reset(chunk_policy)
        return self._engine

    def _start(self, scheduler: SchedulerPlan) -> VllmEngine:
        torch.set_num_threads(1)
        llm, self._vocabulary = start(self._scenario, scheduler.config, self._base)
        return VllmEngine(llm, scheduler.config.block_size)


def start(scenario: ValidationScenario, config: EngineConfig, base: Path) -> tuple[LLMEngine, int]:
    """vLLM's engine with a scenario's settings, and its number of token ids; `BadInput` if vLLM refuses."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = engine_arguments(scenario, config, base, Path(folder))
        try:
            engine = EngineArgs(**arguments, enforce_eager=True, disable_log_stats=True)
            llm = LLMEngine.from_engine_args(engine)
        except (ValueError, RuntimeError) as error:
            text = str(error).strip().splitlines()
            raise BadInput(
                f"expected settings that vLLM accepts: {text[-1] if text else error}", field="engine"
            ) from None
    return llm, int(llm.model_config.get_vocab_size())


def engine_arguments(
    scenario: ValidationScenario, config: EngineConfig, base: Path, folder: Path, **settings: str
) -> dict[str, Any]:
    """Arguments of vLLM's engine for a scenario. A config.json without weights is copied into `folder`.

    `settings`: further ones of the scheduler class, see `live.vllm.settings`.
    """
    model = scenario.model
    engine = scenario.engine
    directory = base / model.path
    if model.weights == "random":
        file = directory / "config.json" if directory.is_dir() else directory
        shutil.copy(file, folder / "config.json")
        directory = folder
    budgets = engine.model_dump(mode="json", include={"one_shot"}, exclude_none=True)
    fields = read_json_object(directory / "config.json")
    kv_tokens = config.num_gpu_blocks * config.block_size
    kv_bytes = (kv_tokens + NULL_BLOCKS * config.block_size) * bytes_per_token(fields, model.dtype)
    kind = "AsyncPolicyScheduler" if engine.async_scheduling else "PolicyScheduler"
    return {
        "model": str(directory), "load_format": "dummy" if model.weights == "random" else "auto",
        "skip_tokenizer_init": True, "dtype": model.dtype, "seed": scenario.seed,
        "num_gpu_blocks_override": config.num_gpu_blocks + NULL_BLOCKS, "kv_cache_memory_bytes": kv_bytes,
        "max_model_len": min(fields["max_position_embeddings"], kv_tokens),
        "async_scheduling": engine.async_scheduling, "scheduler_cls": f"live.vllm.schedulers.{kind}",
        "additional_config": {SECTION: {**budgets, **settings}}, **shared_settings(config),
    }  # fmt: skip


def shared_settings(config: EngineConfig) -> dict[str, Any]:
    """Arguments of vLLM's engine: settings that have its names, but 0, which means no limit.

    One-shot requests get places of their own in vLLM's batch.
    """
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    values = {"scheduler_reserve_full_isl": config.kv_reservation != "chunk"} | dataclasses.asdict(config)
    settings = {name: value for name, value in values.items() if name in names and (value or isinstance(value, bool))}
    if config.one_shot is not None:
        settings["max_num_seqs"] += config.one_shot.sequences
    return settings


def bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of the KV cache of a token, by the fields of a model's config.json."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    width = {"float32": 4, "bfloat16": 2}[dtype]
    return int(2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * size * width)


class VllmServerBackend(VllmBackend):
    """One model in a server of vLLM, started when it is first needed and ended by `close`.

    With `profiling.in_turns`, rounds of other requests precede each replay.
    """

    def __init__(self, scenario: ValidationScenario, base: Path, device: str) -> None:
        super().__init__(scenario, base, device)
        self._server: VllmServer | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._between: ServerProfile | None = None

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfiledRounds:
        return self._profile(scheduler, spec, seed).run()

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayedRun:
        """Send each request to an idle server at its arrival time, and turns of sessions after their answers."""
        server = self._running(scheduler)
        spec = self._scenario.profiling
        profiled = None
        if spec.in_turns:
            if self._between is None:
                self._between = self._profile(scheduler, spec, IN_TURNS_SEED)
            profiled = self._between.run(-(-spec.rounds // (len(self._scenario.loads) * self._scenario.repeats)))
        server.reset_prefix_cache()
        clients = clients_of(requests, self._vocabulary, scheduler.config.prefix_id_tokens)
        return replay_served(server, clients, profiled)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    def _profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ServerProfile:
        server, limits = self._running(scheduler), profiling_limits(scheduler, spec)
        return ServerProfile(server, self._vocabulary, limits, scheduler.config.block_size, seed)

    def _running(self, scheduler: SchedulerPlan) -> VllmServer:
        if self._server is None:
            folder = Path(self._folder.name)
            log = folder / "steps.csv"
            arguments = engine_arguments(
                self._scenario, scheduler.config, self._base, folder, step_log=str(log), clock="wall"
            ) | {"served_model_name": MODEL, "enable_prompt_tokens_details": True, "disable_log_stats": True}
            if self._device == "cpu":
                arguments["enforce_eager"] = True
            self._vocabulary = int(read_json_object(Path(arguments["model"]) / "config.json")["vocab_size"])
            self._server = VllmServer(arguments, self._scenario.model.threads, log)
        return self._server
