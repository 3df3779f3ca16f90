"""The job `export`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raoe_train.artifacts.resume import Output, replacing_model
from raoe_train.encoders.settings import Model, identity
from raoe_train.jobs.shared import job, needed


@dataclass
class ExportConfig:
    """What to export.

    Args:
        merge: make one model of a LoRA adapter and its base
        output: directory to write
        overwrite: replace a model that an earlier export wrote there
    """

    model: Model = field(default_factory=Model)
    merge: bool = False
    output: str | None = None
    overwrite: bool = False


@job
def export(config: ExportConfig) -> dict[str, Any]:
    """Save an encoder with its adapter merged in.

    Where no layer is bidirectional the decoder is saved as what it is, which loads anywhere; otherwise the model loads
    after `raoe_train.register()`, or, with trust_remote_code, where raoe is not installed. An adapter that was trained
    over 4-bit weights is merged into the base model's own.

    Returns:
        {"output", "merged": whether there was an adapter, "bidirectional_layers", "model", "settings", "versions"}.
    """
    from sentence_transformers import SentenceTransformer

    from raoe_train.encoders.bidirectional import register
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel
    from raoe_train.encoders.load import check_whole

    model = config.model
    source = Path(needed(model.name, "model.name", "the encoder to export")).expanduser()
    if not (source / "modules.json").is_file():
        raise FileNotFoundError(f"no model of sentence-transformers in {str(source)!r}")
    target = needed(config.output, "output", "the directory to write to")
    output = Output(target, {"model": identity(model), "merge": config.merge}, config.overwrite, folder=True)
    if finished := output.finished():
        print(f"{target} is finished, from the same model")
        return finished
    if (output.path / "metrics.json").exists():
        raise ValueError(f"output {target} is a run of `train`, which an export does not replace: choose another")
    register()
    ours = (source / "adapter" / "adapter_config.json").is_file()
    theirs = (source / "adapter_config.json").is_file()
    if (ours or theirs) and not config.merge:
        raise ValueError(f"{source} is an adapter: --merge makes one model of it and its base")
    options: dict[str, Any] = {"dtype": model.dtype} if model.dtype else {}
    if ours:
        options["merge_adapter"] = True
    encoder = SentenceTransformer(
        str(source), device="cpu", model_kwargs=options, trust_remote_code=model.trust_remote_code
    )
    if not ours:  # an adapter's parts are checked as they are read
        check_whole(encoder, model.name, foreign=model.trust_remote_code)
    if theirs:
        encoder[0].model = _merged(source, options)
    inner: Any = encoder[0].model
    layers = inner.config.bidirectional_layers if isinstance(inner, BidirectionalModel) else None
    if layers == 0:
        encoder[0].model = inner.decoder
    if not output.replaces:
        output.begin()
    with replacing_model(output) as made:
        encoder.save_pretrained(str(made))
    print(f"{'merged, ' if ours or theirs else ''}saved to {target}")
    return output.finish({"merged": ours or theirs, "bidirectional_layers": layers, "model": model.name})


def _merged(adapter: Path, options: dict[str, Any]) -> Any:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModel

    base = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    return PeftModel.from_pretrained(AutoModel.from_pretrained(base, **options), str(adapter)).merge_and_unload()
