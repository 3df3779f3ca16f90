"""The job `export`: save an encoder with its LoRA adapter merged into the weights."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raoe_train.encoders.preflight import without_reports
from raoe_train.jobs.settings import ExportConfig
from raoe_train.jobs.shared import job, require
from raoe_train.outputs import Output, read_json, replacing_model
from raoe_train.settings import Model


@job
@without_reports()
def export(config: ExportConfig, output: Output) -> dict[str, Any]:
    """Save an encoder with its adapter merged into the weights.

    A decoder without bidirectional layers is saved in transformers' format, which can be loaded without raoe. To
    load an exported model with bidirectional layers, call `raoe_train.register()` first or, if raoe is not installed,
    pass `trust_remote_code=True`. An adapter that was trained on 4-bit weights is merged into the unquantized weights
    of its base model, so the embeddings change slightly. If bitsandbytes is installed, the job compares the embeddings
    of a few sentences before and after merging.

    Returns:
        {"output", "merged": whether there was an adapter, "bidirectional_layers", "model", "settings", "versions"}, and
        for 4-bit weights {"cosines": {"mean", "min"} of the cosines between embeddings before and after merging}.
    """
    from raoe_train.encoders.bidirectional import register
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel
    from raoe_train.encoders.padding import SENTENCES, unit_embeddings

    model = config.model
    source = Path(require(model.name, "model.name", "the encoder to export")).expanduser()
    changed = [name for name, value in vars(model).items() if value != getattr(Model(), name)]
    if ignored := {*changed} - {"name", "dtype", "trust_remote_code", "device"}:
        raise ValueError(f"model.{min(ignored)} has no effect: export copies the encoder as saved; remove the setting")
    if not (source / "modules.json").is_file():
        raise FileNotFoundError(f"no sentence-transformers model in {str(source)!r} (it has no modules.json)")
    target = require(config.output, "output", "the directory to write to")
    if (output.path / "metrics.json").exists():
        raise ValueError(f"output {target} contains a training run, which is never overwritten: choose another output")
    register()
    own_adapter = (source / "adapter" / "adapter_config.json").is_file()
    peft_adapter = (source / "adapter_config.json").is_file()
    merged = own_adapter or peft_adapter
    if merged and not config.merge:
        raise ValueError(f"{source} is an adapter: add --merge to merge it into its base model")
    four_bit = own_adapter and read_json(source / "config.json").get("base_quantization")
    before = unit_embeddings(_load(model), [SENTENCES]) if four_bit and find_spec("bitsandbytes") else None
    encoder = _load(model, merge_own=own_adapter, merge_peft=peft_adapter)
    inner: Any = getattr(encoder[0], "model", None)
    layers = inner.config.bidirectional_layers if isinstance(inner, BidirectionalModel) else None
    if layers == 0:
        encoder[0].model = inner.decoder
    result: dict[str, Any] = {"merged": merged, "bidirectional_layers": layers, "model": model.name}
    if four_bit:
        print("the adapter was trained on 4-bit weights, but is merged into the unquantized weights of its base model")
    if before is not None:
        cosines = (before * unit_embeddings(encoder, [SENTENCES])).sum(1)
        result["cosines"] = {"mean": float(cosines.mean()), "min": float(cosines.min())}
        print(f"cosines between the embeddings of {len(SENTENCES)} sentences before and after merging: mean "
              f"{cosines.mean():.4f}, lowest {cosines.min():.4f}; evaluate {target} again")  # fmt: skip
    if not output.replaces:
        output.begin()
    with replacing_model(output) as folder:
        encoder.save_pretrained(str(folder))
    print(f"{'merged and ' if merged else ''}saved to {target}")
    return result


def _load(model: Model, *, merge_own: bool = False, merge_peft: bool = False) -> Any:
    """Load a saved encoder on the CPU. Optionally merge its adapter (saved by raoe or peft) into the base model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    from raoe_train.encoders.bidirectional.modeling import merged_adapter
    from raoe_train.encoders.load import check_whole

    folder, trusted = str(Path(model.name).expanduser()), model.trust_remote_code
    options: dict[str, Any] = {"dtype": model.dtype} if model.dtype else {}
    merging = {"merge_adapter": True} if merge_own else {}
    encoder: Any = SentenceTransformer(
        folder, device="cpu", trust_remote_code=trusted, model_kwargs={**options, **merging}
    )
    if not merge_own:  # raoe's own adapters are checked when they are loaded
        check_whole(encoder, model.name, foreign=trusted)
    if merge_peft:
        base = encoder[0].model.peft_config["default"].base_model_name_or_path
        # a Transformer, not AutoModel, which would add a decoder to an encoder such as T5's
        whole = Transformer(base, model_kwargs={**options, "trust_remote_code": trusted})
        encoder[0].model = merged_adapter(whole.model, folder, {})
    return encoder
