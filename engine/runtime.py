"""A loaded model with its tokenizer and context: what `engine.load` returns."""

import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .config import DRAFT_SOURCES, RuntimeConfig, check_draft_sources
from .errors import ConfigError
from .experts.fitting import Progress, load_fitting
from .experts.layout import expert_bytes
from .experts.stream import plan_experts
from .generate import Generation
from .kernels import Context
from .kv_cache import KVCache
from .memory import kv_estimate
from .models import family
from .models._mtp import MtpLayer
from .sampler import SamplingParams
from .session import Session
from .spec import LookupSource, make_speculator
from .spec.cut import DraftCut
from .spec.draft_model import ModelSource, check_same_tokens
from .spec.mtp import MtpSource, MtpState
from .tokenizer import Tokenizer
from .weights import open_model
from .weights.base import ModelFiles
from .weights.loader import WeightLoader
from .weights.stream_loader import StreamLoader

SHIPPED_MODEL = Path(__file__).parent / "data" / "tiny-moe" / "snapshot"
PREFILL_TOKENS = 512  # tokens of one forward call; the result does not depend on it


class Engine:
    """Model, tokenizer, context. Make one with `engine.load`."""

    def __init__(self, path: str | Path | ModelFiles, options: RuntimeConfig, progress: Progress | None = None):
        started = time.perf_counter()
        self.options = options
        self.lock = threading.Lock()  # one forward pass at a time: the activations are shared
        files = path if isinstance(path, ModelFiles) else open_model(path)
        self.files = self._with_or_without_mtp(files, options.mtp)
        model_module = family(self.files.architecture)
        self.max_context = self._context_length(options.ctx)
        self.tokenizer = Tokenizer.of_model(self.files, options.force_tokenizer)  # refuses before weights are read
        self.context = Context(options.isa, options.threads, options.arith)
        max_tokens = min(PREFILL_TOKENS, self.max_context)
        sizes = (self.max_context, max_tokens)
        self.kv_bytes = kv_estimate(self.files.model_config, *sizes, options.kv, options.mtp)  # of the whole context
        self.expert_layout, self.stream = plan_experts(self.files, self.context, options, *sizes)
        if self.stream:
            loader = self.loader = StreamLoader(self.files, self.context, self.stream)
        else:
            loader = self.loader = WeightLoader(self.files, self.context, compact_experts=self.expert_layout.compact)
        self.model = model_module.Model(self.files.config, loader, self.context, self.max_context, max_tokens)
        if options.mtp:
            self.model.mtp = MtpLayer(self.model, loader)
        self.tokenizer.check_vocabulary(self.model.config.vocab_size)
        self.draft = self._load_draft(options)
        if self.stream:
            caches = [self.new_kv()] + (
                [self.draft.new_kv(min(self.max_context, self.draft.max_context))] if self.draft else []
            )
            followers = [kv.follower for kv in caches if kv.follower]
            self.stream.open(self.model, sum(kept.num_bytes for kept in caches + followers), progress)
        else:
            self.read_bytes, self.locked_bytes = load_fitting(self, progress)
        self.load_s = time.perf_counter() - started

    @staticmethod
    def _with_or_without_mtp(files: ModelFiles, wanted: bool) -> ModelFiles:
        if not wanted:
            return files.without_mtp()
        if not files.mtp_names:
            named = getattr(files.model_config, "num_extra_layers", 0)
            what = "its files do not hold a whole one, which the config names" if named else "it has none"
            raise ConfigError(
                f"--draft mtp: {files.path} ({files.architecture}) cannot draft with a layer for multi-token "
                f"prediction: {what}; choose another draft source"
            )
        return files

    def _load_draft(self, options: RuntimeConfig) -> "Engine | None":
        if options.draft_model is None:
            return None
        draft = Engine(options.draft_model, RuntimeConfig(self.context.num_threads, self.context.tier, kv=options.kv))
        check_same_tokens(self, draft)
        return draft

    def _context_length(self, ctx: int | None) -> int:
        trained = self.files.config.get("max_position_embeddings")
        if not isinstance(trained, int) or trained < 1:
            raise ConfigError(f"config.json: max_position_embeddings = {trained!r}, expected an integer >= 1")
        if ctx is not None and ctx > trained:
            raise ConfigError(f"--ctx {ctx} exceeds the {trained} positions this model was made for")
        return ctx or trained

    def larger_context_hint(self) -> str:
        """What to say after "shorten the prompt" where a larger --ctx is possible."""
        return " or raise --ctx" if self.max_context < self.files.config["max_position_embeddings"] else ""

    def new_kv(self, capacity: int | None = None) -> KVCache:
        """KV cache for `capacity` positions (default: the whole context)."""
        capacity = capacity or self.max_context
        kv = self.model.new_kv(capacity, self.options.kv)
        if self.model.mtp is not None:
            kv.follower = MtpState(self.model.mtp, capacity, self.options.kv)
        return kv

    def default_sampling(self) -> SamplingParams:
        """Sampler settings of the model's generation_config.json."""
        return SamplingParams.from_generation_config(self.files.generation_config)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        session: Session | None = None,
        spec: int | str = 0,
        draft: Sequence[str] | None = None,
        **settings,
    ) -> Generation:
        """Continue a prompt (text or token ids); iterate the result for pieces of text.

        session: what an earlier call with the same Session left in its cache is not computed again.
        spec: rows of a verify window, 0 to 8 (0 and 1: plain decode), or "auto"; draft: names of draft sources, the
        first that offers something is used ("model" needs draft_model, "mtp" mtp; None: all there are). Neither changes
        the text.
        sampling: None = the model's defaults; settings (temperature=0, seed=1, top_p=0.9 ...: the fields of
        SamplingParams) replace single ones. Raises ConfigError for a prompt that does not fit the context, or a setting
        that does not exist.
        """
        if settings:
            known = [field.name for field in dataclasses.fields(SamplingParams)]
            unknown = sorted(set(settings) - set(known))
            if unknown:
                raise ConfigError(f"generate: unknown setting {', '.join(unknown)}; known: {', '.join(known)}")
            sampling = dataclasses.replace(sampling or self.default_sampling(), **settings)
        sampling = sampling or self.default_sampling()
        speculator = make_speculator(spec, self._draft_sources(draft, sampling), self._draft_cut())
        if speculator.stats is not None:
            speculator.stats.expert_bytes = self._expert_bytes()
        return Generation(
            self, prompt, max_tokens=max_tokens, sampling=sampling, stop=stop, ignore_eos=ignore_eos,
            session=session, speculator=speculator,
        )  # fmt: skip

    def _draft_cut(self) -> DraftCut | None:
        """What cuts windows short where experts are streamed; None where all are in memory, or it is not wanted."""
        return DraftCut.of_stream(self.stream) if self.stream and self.options.cut_drafts else None

    def _expert_bytes(self) -> int:
        """Of one expert, on average: a file may keep those of some layers in wider formats."""
        c = self.model.config
        sizes = [expert_bytes(self, n)[0] for n in range(c.num_hidden_layers) if n not in c.dense_layers]
        return round(sum(sizes) / len(sizes)) if sizes else 0

    def _draft_sources(self, names: Sequence[str] | None, sampling: SamplingParams) -> list:
        if names is None:
            there = {"lookup": True, "mtp": self.options.mtp, "model": self.draft is not None}
            names = [name for name in DRAFT_SOURCES if there[name]]
        check_draft_sources(names)
        if "model" in names and self.draft is None:
            raise ConfigError("--draft model: the engine was loaded without a draft model")
        if "mtp" in names and self.model.mtp is None:
            raise ConfigError("--draft mtp: the engine was loaded without the layer; load it with mtp=True")
        sizes = (self.model.config.vocab_size, self.max_context)
        make = {
            "lookup": LookupSource,
            "mtp": lambda: MtpSource(self.context, sampling),
            "model": lambda: ModelSource(self.draft, sampling, *sizes),
        }
        return [make[name]() for name in names]


def load(path: str | Path | ModelFiles | None = None, progress: Progress | None = None, **options) -> Engine:
    """Open a model directory or file (or take opened files); without a path, the small model that ships.

    options: the fields of RuntimeConfig (threads, isa, ctx, kv, expert_layout, arith, draft_model, mtp
    ...). Raises an EngineError subclass that says what to do.
    """
    return Engine(SHIPPED_MODEL if path is None else path, RuntimeConfig(**options), progress)
