"""A SentenceTransformerTrainer that uses the losses' collators, encodes texts by length, and stops if a loss is NaN."""

import copy
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from datasets import DatasetDict
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.util.distributed import get_world_size
from torch.distributed.fsdp import FSDPModule
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import find_batch_size

from raoe_train.data.rows import columns_in_order, in_our_order
from raoe_train.data.sources import from_frames
from raoe_train.encoders.bidirectional.modeling import set_adapter_weights
from raoe_train.encoders.load import check_vocabulary, low_precision, warn_without_cosine, warn_without_end
from raoe_train.encoders.packed import is_default, without_pooler
from raoe_train.encoders.preflight import without_reports
from raoe_train.encoders.sharding import before_sharding, unsharded
from raoe_train.losses.base import CachedLoss, losses_in
from raoe_train.losses.by_length import ByLength, innermost, misfit
from raoe_train.losses.collators import CLASSES, COSINES, SCORED_PAIRS, PlanningCollator, collator_of, columns_of
from raoe_train.losses.in_batch import InBatchLoss
from raoe_train.losses.keep import Keep, weight_for
from raoe_train.outputs import set_modes
from raoe_train.training import training_data
from raoe_train.training.callbacks import FiniteCheck, LogLines, Meter
from raoe_train.training.run_directory import find_best

logger = logging.getLogger(__name__)
READ_BATCHES = ("compute_loss", "collect_features", "training_step", "prediction_step")  # methods that get a batch


class Trainer(SentenceTransformerTrainer):
    """SentenceTransformerTrainer for raoe_train and sentence-transformers losses: one loss, or one loss per dataset.

    This trainer differs from its base class as follows. The loss determines the collator. raoe losses find their
    columns by name, in any order. If `args` sets no prompts, texts get the encoder's query and document prompts if the
    first column is a query column (such as anchor or question), and the encoder's default prompt otherwise. The texts
    in a batch are encoded in groups of similar length (see ByLength). Checkpoints include the loss's own parameters (a
    learned scale, a classifier), which stay the same in all processes. Weight decay skips scalar parameters. In each
    step, all processes take their rows from the same dataset. Evaluation uses all rows. Log entries are printed as
    plain lines, and experiment trackers also get the speed and the loss's scale. After training with fsdp=True,
    `trainer.model` is a new encoder with all weights, and the encoder that was passed to the trainer stays sharded. If
    a subclass overrides compute_loss, this method receives tokenized columns, and super().compute_loss plans the
    batches.

    Args:
        model: the encoder.
        args: SentenceTransformerTrainingArguments, which are copied and not changed.
        train_dataset: a datasets.Dataset (or DataFrame) with the columns that the loss reads, or {name: dataset}. Each
            batch comes from one dataset. In rows (see row_table), negatives can be missing (None), and a column can
            contain lists of texts.
        eval_dataset: like train_dataset.
        loss: a loss, a function that creates a loss from the model, or {dataset name: loss or function}.
        evaluator, data_collator, others: as in SentenceTransformerTrainer. Your own data_collator replaces the loss's
            collator and must add prompts.
        by_length: False pads every batch to its longest text, as sentence-transformers does.
        packed: pack the texts in a batch into one row without padding, with raoe_kernels' attention. Encoders that do
            not support packing encode padded groups instead (docs/by-length.md). "auto" packs on CUDA with Triton.
        keep: weight of the regularizer that keeps embeddings close to their values before training
            (`losses.keep.Keep`). "auto" is 0.3 for queries and passages and for scores with only two values, else 0.
        pretokenize: tokenize all training texts before the first step, instead of a batch's texts in each step. "auto"
            does this for data of up to 256 MiB if the run reads all of the data; streams are not tokenized in advance.

    Attributes:
        scales: {dataset name, or "train" for a single dataset: current scale of its loss}.
        keep: the weight of the regularizer, as a number.
        meter: the Meter that measures the time and memory use of the training loop.

    Raises:
        ValueError: the losses need different collators, keep is below 0, or a loss does not support keep.
        FloatingPointError (from `train`): the loss, or a weight after a step, is not finite. The message shows rows
            from the batch.
    """

    def __init__(
        self,
        model: Any = None,
        args: SentenceTransformerTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        loss: Any = None,
        evaluator: Any = None,
        data_collator: Any = None,
        *others: Any,
        by_length: bool = True,
        packed: bool | Literal["auto"] = "auto",
        keep: float | Literal["auto"] = 0.0,
        pretokenize: bool | Literal["auto"] = "auto",
        **keywords: Any,
    ) -> None:
        checked = ("model", model, torch.nn.Module), ("args", args, SentenceTransformerTrainingArguments)
        for name, value, kind in checked:
            if not isinstance(value, kind | None):
                raise ValueError(f"{name} of rt.Trainer must be a {kind.__name__}, got {value!r}")
        args = copy.copy(args) if args is not None else SentenceTransformerTrainingArguments(output_dir="tmp_trainer")
        self.by_length, self.packed, self.pretokenize = by_length, packed, pretokenize
        if args.auto_find_batch_size:
            raise ValueError("auto_find_batch_size has no effect in rt.Trainer: set per_device_train_batch_size")
        if isinstance(eval_dataset, Mapping) and args.metric_for_best_model in ("loss", "eval_loss"):
            losses = " or ".join(f"eval_{name}_loss" for name in eval_dataset)
            raise ValueError(f"several evaluation sets have no common eval_loss: set metric_for_best_model to {losses}")
        train_dataset, eval_dataset = from_frames(train_dataset), from_frames(eval_dataset)
        super().__init__(model, args, train_dataset, eval_dataset, loss, evaluator, data_collator, *others, **keywords)
        # transformers' filter hides a NaN in the log and, on a GPU, waits for the loss twice a step.
        self.args.logging_nan_inf_filter = False
        self.keep = weight_for(self.train_dataset, keep)
        if (self.keep or packed is True) and not by_length:
            raise ValueError(f"{'keep' if self.keep else 'packed'} requires by_length=True: remove by_length=False")
        overridden = [name for name in READ_BATCHES if getattr(type(self), name) is not getattr(Trainer, name)]
        if self.keep and overridden:
            raise ValueError(f"{type(self).__name__} overrides {overridden[0]}, so keep would have no effect")
        self.plans = not overridden
        self.wrapped = dict[Any, Any]()  # {loss: ByLength around it, or the loss if ByLength cannot wrap it}
        self.computed_loss()
        if args.fsdp and not self.is_fsdp_enabled:
            raise ValueError("fsdp needs GPUs: accelerate ignores it on this device")
        if self.accelerator.ddp_handler and args.ddp_find_unused_parameters is None and without_pooler(self.model):
            self.accelerator.ddp_handler.find_unused_parameters = False
        if self.accelerator.dispatch_batches is None:  # streams: rank 0 would collate for all, with unequal lengths
            self.accelerator.dataloader_config.dispatch_batches = False
        self._check_encoder()
        if data_collator is None:
            self.data_collator_class = collator_of([inner for _, inner in self._inner()])
            self.data_collator: Any = self.get_data_collator(self.model, args, self.processing_class)
        self.meter = Meter(self)
        self.callback_handler.callbacks.insert(0, self.meter)  # first, so that trackers get the values of the meter
        self.finite = FiniteCheck(self)
        self.add_callback(self.finite)
        # replace the trainer's own callback, which is last; keep the callbacks of users and notebooks
        if own := [each for each in self.callback_handler.callbacks if type(each) is PrinterCallback]:
            self.remove_callback(own[-1])
            self.add_callback(LogLines())

    def _check_encoder(self) -> None:
        """Raise ValueError for an encoder that cannot be trained, and warn about settings that harm training."""
        check_vocabulary(self.model)
        warn_without_end(self.model)
        if any(isinstance(inner, CachedLoss) for _, inner in self._inner()):
            warn_without_cosine(self.model)
        if low := low_precision(self.model):
            logger.warning("%d trainable weight tensors are 16-bit, so small updates are lost: load the encoder "
                           "with dtype float32, and set bf16=True in args to keep training fast", len(low))  # fmt: skip
        if isinstance(self.args.prompts, Mapping):
            training_data.check_prompts(self.args.prompts, self.train_dataset, self.eval_dataset)

    def prepare_loss(self, loss: Any, model: Any) -> Any:
        """If `loss` is a function, call it. Average the gradients of the loss's own parameters over processes."""
        if isinstance(loss, str):
            raise ValueError(f"loss must be a loss object, not its name: pass rt.losses.{loss}(model)")
        loss = super().prepare_loss(loss, model)
        if isinstance(loss, ByLength):
            if loss.keep is not None:
                raise ValueError(f"remove keep from ByLength, and pass keep={loss.keep.weight:g} to rt.Trainer instead")
            loss = loss.loss
        if get_world_size() > 1:  # DistributedDataParallel averages only the encoder's gradients
            encoder = {*map(id, model.parameters())}
            own = [each for _, part in losses_in(loss) for each in part.parameters(recurse=False)]
            for parameter in own:
                if parameter.requires_grad and id(parameter) not in encoder:
                    if self.is_fsdp_enabled:
                        raise ValueError(f"fsdp cannot shard {type(loss).__name__}'s trainable parameters: remove fsdp")
                    torch.distributed.broadcast(parameter.detach(), 0)
                    parameter.register_post_accumulate_grad_hook(_average_gradient)
        return loss

    def computed_loss(self) -> Any:
        """Return the loss, or {dataset name: loss}, with ByLength around each loss that ByLength supports."""
        for loss in self.loss.values() if isinstance(self.loss, Mapping) else [self.loss]:
            if loss not in self.wrapped:
                self.wrapped[loss] = self.wrap_loss(loss)
        if isinstance(self.loss, Mapping):
            return {name: self.wrapped[loss] for name, loss in self.loss.items()}
        return self.wrapped[self.loss]

    def wrap_loss(self, inner: Any) -> Any:
        problem = misfit(inner) if self.by_length else None
        if self.by_length and not problem:
            regularizer = Keep(self.model, self.keep) if self.keep else None
            packed = self.packed
            if packed == "auto":
                packed = self.args.n_gpu == 1 and is_default(self.args.device)
            elif packed and self.args.n_gpu > 1:  # DataParallel would split the packed row
                raise ValueError("packed needs one process per GPU: start training with torchrun")
            loss = ByLength(inner, keep=regularizer, packed=packed)
            loss.compiled = self.args.torch_compile
            graphs = self.args.torch_compile and self.args.torch_compile_mode == "reduce-overhead"
            loss.captured = graphs and get_world_size() == 1 and not self.args.fp16
            loss.tensor_cores = bool(self.args.bf16 or self.args.fp16 or self.args.tf32)
            return loss
        if self.keep:
            raise ValueError(f"keep cannot be used, because {problem}")
        if self.by_length:
            logger.warning("batches stay padded: %s", problem)
        return inner

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        # `self.loss` stays the user's loss, with its attributes; it is computed by length only here
        own, self.loss = self.loss, self.computed_loss()
        try:
            return super().compute_loss(*arguments, **keywords)
        finally:
            self.loss = own

    def preprocess_dataset(self, dataset: Any = None, dataset_name: str | None = None) -> Any:
        if dataset is not None:  # even one that another trainer has preprocessed, for another loss
            dataset = self._in_order(from_frames(dataset), dataset_name)
        if dataset_name == "train" and self.args.prompts is None:  # the collator reads prompts only from args
            self.args.prompts = training_data.own_prompts(self.model, dataset)
        return super().preprocess_dataset(dataset, dataset_name)

    def _in_order(self, data: Any, name: str | None) -> Any:
        """Return a dataset, or {name: dataset}, in the form that its loss requires. raoe losses find columns by name,
        and all other losses by position. For losses that need NLI classes, labels become raoe's class numbers."""
        if isinstance(data, Mapping):
            # copies, because sentence-transformers sets transforms on them in place
            return DatasetDict({key: copy.copy(self._in_order(each, key)) for key, each in data.items()})
        loss = self.loss.get(name or "") if isinstance(self.loss, Mapping) else self.loss
        reads = getattr(innermost(loss), "reads", None)
        result = in_our_order(data, name or "", by_name=reads is not None, classes=reads in (SCORED_PAIRS, CLASSES))
        if (order := columns_in_order(result)) != columns_in_order(data) and self.is_world_process_zero():
            print(f"{name}: columns were matched by name and reordered for the loss: {', '.join(order)}")
        return result

    def add_model_card_callback(self, *arguments: Any) -> None:
        data: Any = self.train_dataset, self.eval_dataset
        # the card's statistics read all texts, which must not be None
        self.train_dataset, self.eval_dataset = map(training_data.without_gaps, data)
        super().add_model_card_callback(*arguments)
        self.train_dataset, self.eval_dataset = data

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        data: Any = self.train_dataset
        if self.args.dataloader_drop_last and data is not None:
            training_data.check_sizes(data if isinstance(data, Mapping) else {"train": data}, self.args)
        for name, loss in self._inner() if data is not None and self.is_world_process_zero() else ():
            each = data[name] if isinstance(data, Mapping) else data
            if getattr(loss, "reads", None) in (SCORED_PAIRS, COSINES):
                training_data.check_scores(name, loss, each)
            if isinstance(loss, InBatchLoss):
                training_data.check_rows(name, loss, each, self.args)
        resume: Any = arguments[0] if arguments else keywords.get("resume_from_checkpoint")
        if resume:
            if self.is_world_process_zero():
                find_best(Path(str(self.args.output_dir)) if resume is True else Path(resume))
            self.accelerator.wait_for_everyone()
        if vars(self.model).pop("_is_accelerate_prepared", False):  # prepared by evaluate(), without averaged gradients
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if self.is_fsdp_enabled:
            self.full = before_sharding(self.model)
        result = super().train(*arguments, **keywords)
        if self.is_fsdp_enabled:  # from here on, each process has all weights
            self.model = unsharded(self.full, self.model).to(self.args.device)
        if self.state.max_steps > 0 == self.state.global_step:
            raise ValueError("nothing was trained: the stream has fewer rows than one batch for each process")
        if (step := self.state.global_step) > (end := self.state.max_steps) > 0:
            logger.warning("nothing was trained: the checkpoint is at step %d, but the run ends at step %d", step, end)
        return result

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> None:
        if self.state.global_step < self.state.max_steps:  # transformers trains one more step if a finished run resumes
            super()._run_epoch(*arguments, **keywords)

    def _build_dataloader(self, dataset: Any, batch_size: int, dataset_kind: str) -> Any:
        """Build a DataLoader that plans its batches, unless accelerate later splits each batch among processes."""
        drops, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False  # evaluate all rows
        try:
            if dataset_kind == "train":
                self.args.dataloader_drop_last = drops
            elif dataset_kind == "test":  # from predict(), which does not preprocess its dataset
                dataset = self.preprocess_dataset(dataset, dataset_kind)
            loader = super()._build_dataloader(dataset, batch_size, dataset_kind)
        finally:
            self.args.dataloader_drop_last = drops
        if self.plans and not self.accelerator.dispatch_batches:
            loader.collate_fn = planning = PlanningCollator(loader.collate_fn, self.computed_loss())
            if dataset_kind == "train" and planning.tokenizer is not None:
                parts = training_data.to_pretokenize(self.pretokenize, loader, self.args)
                planning.pretokenize(parts, self.is_world_process_zero() and not self.args.disable_tqdm)
        return loader

    def collect_features(self, inputs: dict[str, Any]) -> Any:
        return (inputs["plan"], None) if "plan" in inputs else columns_of(inputs)

    def get_train_dataloader(self) -> Any:
        # Split one batch among the processes. If each drew its own batch, a step could mix datasets with other scores.
        args, splitting = self.args, self.accelerator.dataloader_config
        size, split = args.per_device_train_batch_size, splitting.split_batches
        try:
            if not split:
                args.per_device_train_batch_size, splitting.split_batches = size * args.world_size, True
            loader: Any = super().get_train_dataloader()
        finally:
            args.per_device_train_batch_size, splitting.split_batches = size, split
        shard: Any = getattr(loader, "batch_sampler", None)
        # with several processes, accelerate's wrapper does not pass the epoch to its inner sampler: a run that resumes
        # within an epoch would draw the rest of the epoch in the order of epoch 0
        if not hasattr(shard, "set_epoch") and hasattr(getattr(shard, "batch_sampler", None), "set_epoch"):
            shard.set_epoch = shard.batch_sampler.set_epoch
        return loader

    def _inner(self) -> Iterator[tuple[str, Any]]:
        names = self.train_dataset if isinstance(self.train_dataset, Mapping) else ("train",)
        by_name = self.loss if isinstance(self.loss, Mapping) else dict.fromkeys(names, self.loss)
        yield from ((name, innermost(loss)) for name, loss in by_name.items())

    @property
    def scales(self) -> dict[str, float]:
        losses = ((name, inner) for name, inner in self._inner() if isinstance(inner, CachedLoss))
        return {name: getattr(inner, "current_scale", inner.scale) for name, inner in losses}

    def training_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        self.meter.count(inputs)
        self.finite.start(inputs)
        loss = super().training_step(model, inputs, *arguments, **keywords)
        self.finite.read(loss)
        return loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder == -1:  # a stream, whose last batch may be smaller
            state.active_dataloader.remainder = find_batch_size(inputs) * get_world_size()
        return super().prediction_step(model, inputs, *arguments, **keywords)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        numbers = {name for name, parameter in model.named_parameters() if parameter.ndim == 0}
        return [name for name in super().get_decay_parameter_names(model) if name not in numbers]

    # transformers saves only the model. Save a loss's own parameters with the optimizer's state, which has their
    # moments, and before trainer_state.json, which marks a checkpoint as complete.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if state := self._loss_state():
            folder = Path(output_dir)
            folder.mkdir(parents=True, exist_ok=True)  # rank 0 may create the folder later than this process needs it
            torch.save(state, folder / f"loss_state_{self.args.process_index}.pt")
        super()._save_optimizer_and_scheduler(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.is_fsdp_enabled:  # transformers saves shards later, but expects the folder of a checkpoint now
            Path(output_dir or str(self.args.output_dir)).mkdir(parents=True, exist_ok=True)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if self.args.should_save:
            own = self.model
            if isinstance(own, FSDPModule):  # sentence-transformers would save the shards of this process
                self.model = unsharded(self.full, own, state_dict)
            super()._save(output_dir)
            self.model = own
            set_modes(output_dir or str(self.args.output_dir))

    def _load_from_checkpoint(self, checkpoint_path: str, model: Any = None) -> None:
        if isinstance(self.model, FSDPModule):
            return transformers.Trainer._load_from_checkpoint(self, checkpoint_path, self.model)
        with without_reports():
            super()._load_from_checkpoint(checkpoint_path)
        inner: Any = getattr(getattr(self.model, "_orig_mod", self.model)[0], "model", None)
        if getattr(inner, "_hf_peft_config_loaded", False):
            set_adapter_weights(inner, checkpoint_path, {})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (target := self._loss_state()):
            files = [Path(checkpoint, f"loss_state_{process}.pt") for process in (self.args.process_index, 0)]
            file = next((file for file in files if file.is_file()), None)
            state = {} if file is None else torch.load(file, map_location="cpu", weights_only=True)
            if _shapes(state) != _shapes(target):
                raise ValueError(
                    f"{checkpoint} was saved with another loss: this loss has the tensors {_shapes(target)}, but the "
                    f"checkpoint has {_shapes(state)}; resume with the checkpoint's loss, or start over"
                )
            for name, value in target.items():
                value.copy_(state[name])
        super()._load_optimizer_and_scheduler(checkpoint)

    def _loss_state(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of the losses, except those of encoders. (`state_dict()` would include the
        encoders and, if they are sharded, gather all of their weights.)"""
        losses = self.loss if isinstance(self.loss, Mapping) else {"loss": self.loss}
        return {
            f"{name}.{where}{key}": value.detach()
            for name, loss in losses.items()
            for where, part in losses_in(loss)
            for key, value in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            if key not in part._non_persistent_buffers_set
        }


def _average_gradient(parameter: Any) -> None:
    torch.distributed.all_reduce(parameter.grad)
    parameter.grad /= get_world_size()


def _shapes(state: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {[*value.shape]}" for name, value in sorted(state.items())) or "none"
