"""``raoe-train export``: an encoder with its adapter merged into plain weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raoe_train.config import ExportConfig


def export(config: ExportConfig) -> dict[str, Any]:
    """The job `export`: load an encoder and save it again, with --merge its LoRA adapter as part of the weights.

    Where no layer is bidirectional the decoder is saved as what it is, which loads anywhere; otherwise the model loads
    after `import raoe_train`, or, with trust_remote_code, where raoe is not installed. An adapter that was trained over
    4-bit weights is merged into the base model's own.

    Returns:
        {"output", "merged": whether there was an adapter, "bidirectional_layers", "model"}.

    Raises:
        ValueError: no output, an output that is not empty and not to be overwritten, or an adapter without --merge.
        FileNotFoundError: no such model.
    """
    import shutil

    from sentence_transformers import SentenceTransformer

    from raoe_train.encoders.bidirectional import register
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel

    if not config.output:
        raise ValueError("--output is missing: the directory to write to")
    output = Path(config.output).expanduser()
    if output.is_dir() and any(output.iterdir()) and not config.overwrite:
        raise ValueError(f"{output} is not empty; choose another output, or --overwrite it")
    source = Path(config.model.name).expanduser()
    if not (source / "modules.json").is_file():
        raise FileNotFoundError(f"no model of sentence-transformers in {str(source)!r}")
    if source.resolve() == output.resolve():
        raise ValueError(f"output and model.name are both {output}")
    register()
    ours = (source / "adapter" / "adapter_config.json").is_file()
    theirs = (source / "adapter_config.json").is_file()
    if (ours or theirs) and not config.merge:
        raise ValueError(f"{source} is an adapter: --merge makes one model of it and its base")
    options: dict[str, Any] = {"dtype": config.model.dtype} if config.model.dtype else {}
    if ours:
        options["merge_adapter"] = True
    model = SentenceTransformer(
        str(source), device="cpu", model_kwargs=options, trust_remote_code=config.model.trust_remote_code
    )
    if theirs:
        model[0].model = _merged(source, options)
    inner: Any = model[0].model
    layers = inner.config.bidirectional_layers if isinstance(inner, BidirectionalModel) else None
    if layers == 0:
        model[0].model = inner.decoder
    if config.overwrite and output.is_dir():
        shutil.rmtree(output)
    model.save_pretrained(str(output))
    merged = "merged, " if ours or theirs else ""
    print(f"{merged}saved to {output}")
    return {
        "output": str(output),
        "merged": ours or theirs,
        "bidirectional_layers": layers,
        "model": config.model.name,
    }


def _merged(adapter: Path, options: dict[str, Any]) -> Any:
    from peft import PeftConfig, PeftModel
    from transformers import AutoModel

    base = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    return PeftModel.from_pretrained(AutoModel.from_pretrained(base, **options), str(adapter)).merge_and_unload()
