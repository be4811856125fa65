"""Exported checkpoints: every scale where vLLM looks for it, an error for each way to lose one, the same model after
V's mean has moved.
"""

import json
import shutil
import stat
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

from fp8attn import KVScales, LayerScales, UsageError  # noqa: E402
from fp8attn_tools import calibrate  # noqa: E402
from fp8attn_tools.checkpoints import check, export  # noqa: E402
from fp8attn_tools.checkpoints.check import SCALES  # noqa: E402
from fp8attn_tools.checkpoints.folder import INDEX, Checkpoint  # noqa: E402
from tests.support.transformers_models import SHAPE, VOCABULARY, make, one_thread  # noqa: E402, F401

STRATEGIES = ("tensor", "attn_head")
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 64


def save(folder, family="llama", dtype=torch.float32, **changes):
    """A random model in a folder; biases of attention are random too."""
    size = changes.pop("max_shard_size", "5GB")
    model = make(family, **changes)
    for name, p in model.named_parameters():
        if name.endswith("proj.bias"):
            p.data.normal_(std=2.0, generator=torch.Generator().manual_seed(len(name)))
    model.to(dtype).save_pretrained(folder, max_shard_size=size)
    return folder


def some_scales(
    layers=range(LAYERS), q_scale=True, k_mean=None, v_mean=None, num_layers=LAYERS, head_dim=HEAD_DIM, **changes
):
    """Scales that differ in every layer, head and tensor."""
    made = {}
    for index in layers:
        heads = torch.arange(KV_HEADS) + 1.0
        zero = torch.zeros(KV_HEADS, head_dim)
        options = {"key_dtype": "e4m3", "rotate_keys": False} | changes
        made[index] = LayerScales(
            heads / 60 + index,
            heads / 130 + index,
            zero if k_mean is None else k_mean,
            zero if v_mean is None else v_mean,
            **options,
        )
        if q_scale:
            object.__setattr__(made[index], "q_scale", torch.arange(Q_HEADS) / 256 + index + 1)
    return KVScales(made, num_layers=num_layers, num_kv_heads=KV_HEADS, head_dim=head_dim, model_id="org/model")


@pytest.fixture(scope="module", params=["5GB", "60KB"], ids=["one file", "shards"])
def model(request, tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("checkpoint") / "model", max_shard_size=request.param, attention_bias=True)
    assert (folder / INDEX).exists() == (request.param == "60KB")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "templates").mkdir()
    (folder / "templates" / "chat.jinja").write_text("chat")
    (folder / "consolidated.safetensors").write_bytes((next(folder.glob("model*.safetensors"))).read_bytes())
    (folder / "params.json").write_text("{}")
    if request.param == "5GB":  # without an index, a second file would be refused
        (folder / "consolidated.safetensors").unlink()
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_export_is_read_back(model, tmp_path, strategy):
    scales, out = some_scales(), tmp_path / "new" / "out"
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    exported = export(model, scales, out, strategy=strategy)
    assert before == {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    assert (exported.strategy, exported.skip_layers, exported.moved) == (strategy, (), ())
    for index in range(LAYERS):
        layer = scales.layer(index)
        for x, given in (("q", layer.q_scale), ("k", layer.k_scale), ("v", layer.v_scale)):
            assert torch.equal(exported.scales[index][x], given if strategy == "attn_head" else given.amax()[None])
    names = set(load_file(out / SCALES))
    shapes = {
        name.removeprefix("model.layers.1.self_attn."): list(t.shape)
        for name, t in load_file(out / SCALES).items()
        if ".1." in name
    }
    if strategy == "tensor":  # the names and shapes that vLLM's loader reads: formats.py
        assert shapes == {"q_scale": [1], "k_scale": [1], "v_scale": [1]}
    else:
        assert shapes == {"q_scale": [4, 1, 1], "k_scale": [2, 1, 1], "v_scale": [2, 1, 1]}
    index = json.loads((out / INDEX).read_text())
    files = {path.name for path in out.glob("*.safetensors")}
    assert (
        set(index["weight_map"].values()) == files
        and {n for n, f in index["weight_map"].items() if f == SCALES} == names
    )
    assert index["metadata"]["total_size"] >= sum((out / file).stat().st_size for file in files - {SCALES})
    assert (out / "templates" / "chat.jinja").read_text() == "chat" and (out / "tokenizer_config.json").is_symlink()
    assert not (out / "params.json").exists()  # vLLM would read Mistral's files instead of the index
    assert not stat.S_IMODE((out / SCALES).stat().st_mode) ^ stat.S_IMODE((out / "config.json").stat().st_mode)
    assert [path.name for path in out.parent.iterdir()] == ["out"]  # no draft is left
    assert exported.command == f"vllm serve {out} --kv-cache-dtype fp8"


def test_configs(model, tmp_path):
    for strategy in STRATEGIES:
        export(model, some_scales(), tmp_path / strategy, strategy=strategy)
        config = json.loads((tmp_path / strategy / "config.json").read_text())
        quantization = config.pop("quantization_config")
        assert config == json.loads((model / "config.json").read_text())
        scheme = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False, "strategy": strategy}
        assert quantization["quant_method"] == "compressed-tensors" and quantization["kv_cache_scheme"] == scheme
        assert quantization["config_groups"] == {}  # without the key, vLLM cannot cut scales of heads


@torch.no_grad()
def logits(folder):
    ids = torch.randint(3, VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(1))
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    return found(ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_v_leaves_the_model_as_it_is(tmp_path, dtype):
    model = save(tmp_path / "model", dtype=dtype, attention_bias=True, max_shard_size="60KB")
    mean = torch.randn(KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    before = {path: path.read_bytes() for path in model.iterdir()}
    out = export(model, some_scales(v_mean=mean), tmp_path / "out").folder
    assert before == {path: path.read_bytes() for path in model.iterdir()}  # the originals, which the overlay links to
    assert check(out).moved == (0, 1, 2)
    old, new = Checkpoint.read(model), Checkpoint.read(out)
    changed = {name for name in old.tensors if not torch.equal(old.get(name), new.get(name))}
    assert changed == {f"model.layers.{i}.self_attn.{name}_proj.bias" for i in range(LAYERS) for name in "vo"}
    for name in changed:
        if ".v_proj" in name:
            torch.testing.assert_close(
                new.get(name), (old.get(name).double() - mean.flatten()).to(dtype), rtol=0, atol=0
            )
    edit("config.json", lambda v: v.pop("quantization_config"))(out)  # with it, transformers would round K and V
    exact, moved = logits(model), logits(out)
    error = ((moved - exact).norm() / exact.norm()).item()
    # The only rounding is of o_proj's biases: half a unit in the last place of each, 2^-24 or 2^-9 relative to numbers
    # of the size of the hidden states, which three layers add up and amplify several times.
    assert 0 < error < 16 * torch.finfo(dtype).eps / 2
    # Without o_proj's part the model is another one.
    with_old_o = tmp_path / "wrong"
    shutil.copytree(out, with_old_o)
    for file in with_old_o.glob("model-0*.safetensors"):  # transformers reads these, and not the scales, by the index
        tensors = {n: old.get(n) if "o_proj.bias" in n else t for n, t in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    assert (logits(with_old_o) - exact).norm() / exact.norm() > 0.1


def test_without_folding_scales_cover_the_means(model, tmp_path):
    """`|k| <= |k - mean| + |mean|`: of K always, of V without folding. In E4M3 the larger scale costs no precision."""
    mean = torch.tensor([[1.0], [-3.0]]) * torch.linspace(-1, 0.5, HEAD_DIM)
    scales = some_scales(k_mean=2 * mean, v_mean=mean)
    folded, covered = (
        export(model, scales, tmp_path / str(fold), strategy="attn_head", fold_v_mean=fold) for fold in (True, False)
    )
    largest = torch.tensor([1.0, 3.0]) / 448
    for index, layer in scales.layers.items():
        assert torch.equal(folded.scales[index]["v"], layer.v_scale)
        torch.testing.assert_close(covered.scales[index]["v"], layer.v_scale + largest)
        assert torch.equal(covered.scales[index]["k"], folded.scales[index]["k"])
        torch.testing.assert_close(covered.scales[index]["k"], layer.k_scale + 2 * largest)
    assert folded.moved == (0, 1, 2) and covered.moved == ()
    assert all(path.is_symlink() for path in covered.folder.glob("model-0*.safetensors"))


@pytest.mark.skipif(transformers.utils.is_compressed_tensors_available(), reason="tests/vllm has the package")
def test_transformers_wants_compressed_tensors(model, tmp_path):
    out = export(model, some_scales(), tmp_path / "out").folder
    with pytest.raises(ImportError, match="compressed"):
        logits(out)


def test_a_fused_projection(tmp_path):
    """Phi-3's qkv_proj, given biases."""
    model = make("phi3-partial-rotary")
    for layer in model.model.layers:
        for projection in (layer.self_attn.qkv_proj, layer.self_attn.o_proj):
            projection.bias = torch.nn.Parameter(torch.randn(projection.out_features))
    model.save_pretrained(tmp_path / "model")
    mean = torch.randn(KV_HEADS, HEAD_DIM)
    scales = some_scales(v_mean=mean)
    out = export(tmp_path / "model", scales, tmp_path / "out").folder
    assert "model.layers.0.self_attn.k_scale" in load_file(out / SCALES)
    old, new = Checkpoint.read(tmp_path / "model"), Checkpoint.read(out)
    name = "model.layers.2.self_attn.qkv_proj.bias"
    assert torch.equal(new.get(name)[:384], old.get(name)[:384])  # 4 query heads and 2 KV heads of 64
    torch.testing.assert_close(new.get(name)[384:], old.get(name)[384:] - mean.flatten())
    name = "model.layers.2.self_attn.o_proj"
    moved = old.get(f"{name}.weight").double() @ mean.repeat_interleave(2, 0).flatten().double()
    torch.testing.assert_close(new.get(f"{name}.bias").double(), old.get(f"{name}.bias") + moved, rtol=1e-5, atol=1e-5)


def test_a_calibrated_model(tmp_path):
    folder = save(tmp_path / "model", attention_bias=False)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(3, VOCABULARY, (2, 200), generator=torch.Generator().manual_seed(2))
    scales = calibrate(loaded, ids.split(1), key_dtype="e4m3", rotate_keys=False)
    found = export(folder, scales, tmp_path / "out", strategy="attn_head")
    assert torch.equal(found.scales[1]["k"], scales.layer(1).k_scale)


def rewrite(change):
    """A way to damage an export: a change of its scales."""

    def damage(out):
        tensors = load_file(out / SCALES)
        with_note = (out / SCALES).read_bytes()
        note = json.loads(with_note[8 : 8 + int.from_bytes(with_note[:8], "little")])["__metadata__"]
        change(tensors)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, out / SCALES, note)
        index = json.loads((out / INDEX).read_text())
        named = {name: file for name, file in index["weight_map"].items() if file != SCALES}
        (out / INDEX).write_text(json.dumps({**index, "weight_map": named | dict.fromkeys(tensors, SCALES)}))

    return damage


def edit(file, change):
    """A way to damage an export: a change of a JSON file."""

    def damage(out):
        value = json.loads((out / file).read_text())
        change(value)
        (out / file).write_text(json.dumps(value))

    return damage


K = "model.layers.1.self_attn.k_scale"


def scheme(config):
    return config["quantization_config"]["kv_cache_scheme"]


DAMAGES = {
    "missing": (rewrite(lambda t: t.pop(K)), rf"lacks {K}, and vLLM would take 1\.0"),
    "query's missing": (
        rewrite(lambda t: t.pop(K.replace("k_scale", "q_scale"))),
        "lacks model.layers.1.self_attn.q_scale",
    ),
    "renamed": (
        rewrite(lambda t: t.update({"model.layer.1.self_attn.k_scale": t.pop(K)})),
        "model.layer.1.* vLLM does not know",
    ),
    "of another layer": (
        rewrite(lambda t: t.update({K.replace(".1.", ".7."): t[K]})),
        "layers.7.self_attn.k_scale, which are",
    ),
    "of another format": (
        rewrite(lambda t: t.update({K.replace("k_scale", "k_proj.k_scale"): t.pop(K)})),
        f"lacks {K}",
    ),
    "of an old format": (
        rewrite(lambda t: t.update({"model.layers.0.self_attn.kv_scale": t[K]})),
        "self_attn.kv_scale",
    ),
    "NaN": (rewrite(lambda t: t.update({K: torch.full((1,), torch.nan)})), f"{K} must be positive and finite, and is"),
    "zero": (rewrite(lambda t: t.update({K: torch.zeros(1)})), f"{K} must be positive and finite"),
    "negative": (rewrite(lambda t: t.update({K: -torch.ones(1)})), f"{K} must be positive and finite"),
    "wrong shape": (rewrite(lambda t: t.update({K: torch.ones(2)})), rf"{K} must be \[1\] .* and is \[2\] F32"),
    "wrong dtype": (
        rewrite(lambda t: t.update({K: torch.ones(1, dtype=torch.int32)})),
        rf"{K} must be .* and is \[1\] I32",
    ),
    "another value": (
        rewrite(lambda t: t.update({K: torch.full((1,), 7.0)})),
        r"scale of K of layer 1 is \[7.0\], .* \[1.0333",
    ),
    "not in the index": (edit(INDEX, lambda v: v["weight_map"].pop(K)), f"{K} is in no file, and it is in {SCALES}"),
    "only in the index": (
        edit(INDEX, lambda v: v["weight_map"].update({"x": SCALES})),
        "x is in .* in none of the files",
    ),
    "file not in the index": (
        edit(INDEX, lambda v: v.update(weight_map={n: f for n, f in v["weight_map"].items() if f != SCALES})),
        f"does not name {SCALES}: vLLM would not read it",
    ),
    "no index": (lambda out: (out / INDEX).unlink(), "has no model.safetensors.index.json"),
    "no note": (lambda out: save_file(load_file(out / SCALES), out / SCALES), "has no entry 'fp8attn' with JSON"),
    "no file": (lambda out: (out / SCALES).unlink(), f"names {SCALES}, which the folder does not have"),
    "cut short": (lambda out: (out / SCALES).write_bytes((out / SCALES).read_bytes()[:-4]), "cut short"),
    "no config": (edit("config.json", lambda v: v.pop("quantization_config")), "vLLM would read no scales"),
    "another method": (
        edit("config.json", lambda v: v["quantization_config"].update(quant_method="fp8")),
        "quant_method 'fp8'",
    ),
    "no scheme": (
        edit("config.json", lambda v: v["quantization_config"].pop("kv_cache_scheme")),
        "kv_cache_scheme None",
    ),
    "asymmetric": (edit("config.json", lambda v: scheme(v).update(symmetric=False)), "kv_cache_scheme is"),
    "integers": (edit("config.json", lambda v: scheme(v).update(type="int")), "kv_cache_scheme is"),
    "channels": (edit("config.json", lambda v: scheme(v).update(strategy="channel")), "kv_cache_scheme is"),
    "heads": (edit("config.json", lambda v: scheme(v).update(strategy="attn_head")), r"must be \[4, 1, 1\]"),
    "no JSON": (lambda out: (out / "config.json").write_text("{"), "cannot read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_export_is_refused(model, tmp_path, damage):
    out = export(model, some_scales(), tmp_path / "out").folder
    change, message = DAMAGES[damage]
    change(out)
    with pytest.raises(UsageError, match=message):
        check(out, some_scales())


def test_a_broken_link_is_refused(tmp_path):
    model = save(tmp_path / "model")
    out = export(model, some_scales(), tmp_path / "out").folder
    (model / "model.safetensors").rename(model / "other.safetensors")
    with pytest.raises(
        UsageError, match=r"names model-00001-of-00001.safetensors, which the folder does not have \(a broken link\?\)"
    ):
        check(out)


def some_mean():
    return torch.ones(KV_HEADS, HEAD_DIM)


def with_bad_q_scale():
    scales = some_scales()
    object.__setattr__(scales.layers[2], "q_scale", torch.ones(KV_HEADS))
    return scales


REFUSED = {
    "int8": (
        lambda: (some_scales(key_dtype="int8"), {}),
        "key_dtype='int8', rotate_keys=False; calibrate again with key_dtype='e4m3'",
    ),
    "rotated": (lambda: (some_scales(rotate_keys=True), {}), "rotate_keys=True; calibrate again"),
    "q_scale of KV heads": (
        lambda: (with_bad_q_scale(), {}),
        r"layer 2: q_scale must be \[4\], one for each query head; it is \[2\]",
    ),
    "no q_scale": (lambda: (some_scales(q_scale=False), {}), "layer 0 has no scale for queries.*calibrate again"),
    "a layer without": (
        lambda: (some_scales([0, 2]), {}),
        r"no scales for layer 1 .* would take 1.0.*skip_layers=\[1\].*--kv-cache-dtype-skip-layers 1",
    ),
    "too many layers": (lambda: (some_scales(range(4), num_layers=4), {}), "num_layers is 4 in the scales and 3"),
    "another head_dim": (lambda: (some_scales(head_dim=128), {}), "head_dim is 128 in the scales and 64"),
    "another model": (lambda: (replace(some_scales(), model_id="org/other"), {}), "the scales are for 'org/other'"),
    "an unknown layer": (
        lambda: (some_scales(), {"skip_layers": [9]}),
        r"skip_layers has \[9\].*attention in layers 0-2",
    ),
    "all layers": (lambda: (some_scales(), {"skip_layers": range(3)}), "no scales to write"),
    "an unknown strategy": (
        lambda: (some_scales(), {"strategy": "channel"}),
        "strategy must be one of .*got 'channel'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scales_that_do_not_fit_are_refused(model, tmp_path, case):
    make_scales, message = REFUSED[case]
    scales, options = make_scales()
    with pytest.raises(UsageError, match=message):
        export(model, scales, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_a_mean_without_a_bias_for_it_is_refused(tmp_path):
    model = save(tmp_path / "model")
    with pytest.raises(
        UsageError,
        match=r"lacks model.layers.0.self_attn.v_proj.bias, model.layers.0.self_attn.o_proj.bias.*fold_v_mean=False",
    ):
        export(model, some_scales(v_mean=some_mean()), tmp_path / "out")


def test_skipped_layers_have_no_scales_and_are_in_the_command(model, tmp_path):
    """Layer 1 has no scales; layer 2 has some, and the caller wants it in 16 bits."""
    scales = some_scales([0, 2], v_mean=some_mean())
    exported = export(model, scales, tmp_path / "out", skip_layers=[2, 1])
    assert set(exported.scales) == {0} and exported.moved == (0,) and exported.skip_layers == (1, 2)
    assert exported.command.endswith("--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 1 2")
    assert check(tmp_path / "out", scales).skip_layers == (1, 2)


def test_sliding_layers_must_be_skipped(tmp_path):
    model = make("qwen2-mixed")
    model.save_pretrained(tmp_path / "model")
    model.config.name_or_path = str(tmp_path / "model")
    ids = torch.randint(3, VOCABULARY, (2, 200), generator=torch.Generator().manual_seed(2))
    scales = calibrate(model, ids.split(1), key_dtype="e4m3", rotate_keys=False)
    with pytest.raises(
        UsageError, match=r"no scales for layer 0 \(sliding .*skip_layers=\[0\].*--kv-cache-dtype-skip-layers 0"
    ):
        export(tmp_path / "model", scales, tmp_path / "out")
    exported = export(tmp_path / "model", scales, tmp_path / "out", skip_layers=[0])
    assert set(exported.scales) == {1, 2}


def test_shared_layers_are_refused(tmp_path):
    model = save(tmp_path / "model")
    edit("config.json", lambda v: v.update(num_kv_shared_layers=1))(model)
    with pytest.raises(UsageError, match="the last 1 layers share K and V"):
        export(model, some_scales(), tmp_path / "out")


def test_an_exported_checkpoint_is_not_exported_again(model, tmp_path):
    out = export(model, some_scales(), tmp_path / "out" / "model").folder
    with pytest.raises(UsageError, match=r"has a kv_cache_scheme already.*export the original"):
        export(out, some_scales(), tmp_path / "again")


def test_a_checkpoint_of_modelopt_is_refused(tmp_path):
    model = save(tmp_path / "model")
    (model / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UsageError, match="says how it is quantized; export the 16-bit checkpoint without"):
        export(model, some_scales(), tmp_path / "out")


def test_a_checkpoint_with_compressed_weights_keeps_their_config(tmp_path):
    model = save(tmp_path / "model")
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    edit("config.json", lambda v: v.update(quantization_config=quantization))(model)
    out = export(model, some_scales(), tmp_path / "out", strategy="attn_head").folder
    found = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (
        found["config_groups"] == groups
        and found["ignore"] == ["lm_head"]
        and found["kv_cache_scheme"]["strategy"] == "attn_head"
    )


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "modelopt"])
def test_other_quantized_checkpoints_are_refused(tmp_path, method):
    model = save(tmp_path / "model")
    edit("config.json", lambda v: v.update(quantization_config={"quant_method": method}))(model)
    with pytest.raises(UsageError, match=f"a quantization_config of {method}"):
        export(model, some_scales(), tmp_path / "out")


def test_unknown_names_are_listed(tmp_path):
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=VOCABULARY, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    edit(
        "config.json",
        lambda v: v.update(
            num_attention_heads=2, hidden_size=64, num_hidden_layers=3, num_key_value_heads=2, head_dim=64
        ),
    )(tmp_path / "model")
    with pytest.raises(
        UsageError, match=r"found none: there are transformer.h.N.attn.c_attn.bias, transformer.h.N.attn"
    ):
        export(tmp_path / "model", some_scales(), tmp_path / "out")


def test_a_vision_encoder_is_not_the_decoder(tmp_path):
    model = save(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tower = {f"vision_tower.{name}": tensor[:32].clone() for name, tensor in tensors.items() if ".layers." in name}
    decoder = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tower | decoder, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"text_config": config, "vision_config": {}}))
    out = export(model, some_scales(), tmp_path / "out").folder
    assert "language_model.model.layers.2.self_attn.v_scale" in load_file(out / SCALES)
    save_file(
        decoder | {f"draft.{n}": t.clone() for n, t in tensors.items()}, model / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(
        UsageError, match=r"draft.model.layers.N, language_model.model.layers.N: any|language_model.*draft.*: any"
    ):
        export(model, some_scales(), tmp_path / "other")


def test_the_hub_cache_names_the_model(tmp_path):
    model = save(tmp_path / "models--org--model" / "snapshots" / "0123abc")
    export(model, some_scales(), tmp_path / "out")


def test_nothing_is_overwritten_and_nothing_half_is_left(model, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("precious")
    with pytest.raises(UsageError, match="exists; name a folder that does not"):
        export(model, some_scales(), tmp_path / "full")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        export(model, some_scales(), tmp_path / "file" / "out")
    monkeypatch.setattr("fp8attn_tools.checkpoints.overlay.check", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export(model, some_scales(), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_what_is_no_checkpoint(tmp_path):
    for make_it_better, message in (
        (lambda: (tmp_path / "m").mkdir(), "there is no folder"),
        (lambda: (tmp_path / "m" / "config.json").write_text("[]"), "cannot read .*config.json"),
        (lambda: (tmp_path / "m" / "config.json").write_text("{}"), "must hold a JSON object, and holds a list"),
        (
            lambda: save_file({"x": torch.ones(1)}, tmp_path / "m" / "model.safetensors"),
            "must have one safetensors file; it has none",
        ),
        (
            lambda: (tmp_path / "m" / "config.json").write_text(json.dumps(SHAPE | {"num_attention_heads": "4"})),
            "must have num_attention_heads",
        ),
        (lambda: None, "must have num_attention_heads"),
    ):
        with pytest.raises(UsageError, match=message):
            export(tmp_path / "m", some_scales(), tmp_path / "out")
        make_it_better()
