"""Models by hub name, from a local server with the hub's protocol."""

import json
import shutil
import socket

import pytest
import torch
import transformers
import yaml
from checkpoints import make_model
from command_line import FLOAT, document, documented_keys, error, invoke, keys_in, run
from gguf_files import write_model
from hub_server import TOKEN, Repository, files_in, serving
from huggingface_hub import constants
from lowbit.files.hub import download, hub_name

TOKENS = ["<s>", "</s>", "t", "h", "th", "e", "the", *[chr(0x100 + number) for number in range(396)]]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub, and an empty huggingface_hub cache; huggingface_hub reads its settings at import."""
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server speaks Git LFS only
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # cached by its first caller with that caller's address
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(tmp_path)  # so that no model name is an existing path
        yield server


def test_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("hf:org/model") == ("org/model", None, None)
    assert hub_name("hf:org/model-1.5@refs-pr_1") == ("org/model-1.5", None, "refs-pr_1")
    assert hub_name("hf:org/model/a/b-Q4.gguf@v1") == ("org/model", "a/b-Q4.gguf", "v1")
    for path in ("model", "org/model", "org/model@v1", "org/model/x.gguf", "./org/model", "/org/model", "../org/model"):
        assert hub_name(path) is None, path
    for name in (
        "hf:",
        "hf:model",
        "hf:org/model/more",
        "hf:../org/model",
        "hf:org/model@",
        "hf:org/model@a b",
        "hf:/org/model",
    ):
        with pytest.raises(ValueError, match="is not a name on a hub; expected hf:org/model"):
            hub_name(name)
    (tmp_path / "hf:org").mkdir()
    (tmp_path / "hf:org" / "model").mkdir()
    assert hub_name("hf:org/model") is None, "a directory of this name is here"
    assert str(download("hf:org/model")) == "hf:org/model"


@pytest.mark.parametrize(
    "command", ["inspect", "quantize", "import", "dequantize", "generate", "chat", "serve", "eval", "bench"]
)
def test_a_path_that_does_not_exist_asks_no_hub(hub, command):
    more = {
        "quantize": ["out"],
        "import": ["out"],
        "dequantize": ["out"],
        "generate": ["--prompt", "x"],
        "eval": ["--text", __file__],
    }
    for path in ("modles/typo", "models/typo@v1", "models/typo.gguf", "models/a/typo.gguf"):
        said = error(invoke(command, path, *more.get(command, [])))
        assert said == f"{path} does not exist; a model on a hub is named hf:{path}"
    assert hub.asked == []


@pytest.mark.more
def test_a_pinned_model_runs_as_the_local_one_and_again_without_the_hub(packed, tmp_path):
    arguments = ["--prompt", "Return the number", "--max-new-tokens", 8, "--json"]
    expected = document(invoke("generate", packed[0], *arguments))["tokens"]
    with serving() as server:
        model = server.models["org/model"] = Repository()
        sha = model.commit(files_in(packed[0]) | {"modeling.py": b"raise SystemExit", "weights.bin": b"pickle"}, "v1")
        model.commit({"config.json": b"{}"}, "main")
        settings = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        found = document(run("generate", "hf:org/model@v1", *arguments, cwd=tmp_path, **settings))
        assert found["tokens"] == expected and sha in found["model"]
        asked = [path for _, path in server.asked]
        assert any(path.endswith("/model.safetensors") for path in asked)
        assert not any(path.endswith((".py", ".bin")) for path in asked)
    for name in ("hf:org/model@v1", f"hf:org/model@{sha}"):
        again = document(run("generate", name, *arguments, cwd=tmp_path, **settings | {"HF_HUB_OFFLINE": "1"}))
        assert (again["tokens"], again["model"]) == (expected, found["model"])


def test_other_commands_take_names(hub, packed, tmp_path):
    hub.models["org/float"] = Repository()
    hub.models["org/float"].commit(files_in(FLOAT))
    result = invoke("quantize", "hf:org/float", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert f"getting hf:org/float from {hub.address} ..." in result.stderr
    assert invoke("quantize", FLOAT, tmp_path / "local").exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "local" / "model.safetensors").read_bytes()
    hub.models["org/packed"] = Repository()
    hub.models["org/packed"].commit(files_in(packed[0]))
    described = [document(invoke("inspect", name, "--json")) for name in ("hf:org/packed", packed[0])]
    assert described[0]["tensors"] == described[1]["tensors"]
    draft = invoke("generate", packed[0], "--prompt", "Return", "--max-new-tokens", 4, "--draft", "hf:org/packed")
    assert (
        draft.exit_code == 0
        and draft.stdout == invoke("generate", packed[0], "--prompt", "Return", "--max-new-tokens", 4).stdout
    )


def test_a_gguf_file_of_a_repository(hub, tmp_path):
    write_model(tmp_path / "model-Q8.gguf", make_model(dtype=torch.float32), "Q8_0", TOKENS)
    hub.models["org/model-GGUF"] = Repository()
    hub.models["org/model-GGUF"].commit(
        {"model-Q8.gguf": (tmp_path / "model-Q8.gguf").read_bytes(), "model-Q4.gguf": b"not this"}
    )
    result = invoke("import", "hf:org/model-GGUF/model-Q8.gguf", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert invoke("import", tmp_path / "model-Q8.gguf", tmp_path / "local").exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "local" / "model.safetensors").read_bytes()
    assert not any(path.endswith("model-Q4.gguf") for _, path in hub.asked)
    assert error(invoke("inspect", "hf:org/model-GGUF/x.gguf")) == f"org/model-GGUF on {hub.address} has no file x.gguf"


def test_models_of_the_cache_are_listed_and_removed(hub, packed, tmp_path, monkeypatch):
    assert document(invoke("list", "--json")) == {"models": []} and invoke("list").stdout == "no model was downloaded\n"
    model, other = Repository(), Repository()
    hub.models |= {"org/model": model, "org/other": other}
    files = {name: content for name, content in files_in(packed[0]).items() if name != "README.md"}  # it is not downloaded
    first, second = model.commit(files, "v1"), model.commit(files | {"more.json": b"{}"}, "main", "v2")
    other.commit({"config.json": b"{}", "model.safetensors": files["model.safetensors"]})
    for name in ("hf:org/model@v1", "hf:org/model@v2", "hf:org/model", "hf:org/other"):
        assert invoke("inspect", name).exit_code == 0
    said = document(invoke("list", "--json"))
    assert set(said) | keys_in(said["models"]) == documented_keys("list")
    rows = {each["revision"]: each for each in said["models"]}
    assert [(each["name"], each["kind"]) for each in said["models"]] == [
        ("hf:org/model", "packed"), ("hf:org/model", "packed"), ("hf:org/other", "float"),
    ]  # fmt: skip
    assert (rows[first]["refs"], rows[second]["refs"]) == (["v1"], ["main", "v2"])
    assert rows[second]["bytes"] == rows[first]["bytes"] + 2 == sum(map(len, files.values())) + 2
    assert all(first in path or second in path for path in (rows[first]["path"], rows[second]["path"]))
    shown = invoke("list").stdout
    assert first[:12] in shown and "main, v2" in shown and "float" in shown

    assert "--yes" in invoke("rm", "hf:org/model").stderr and len(document(invoke("list", "--json"))["models"]) == 3
    gone = document(invoke("rm", f"hf:org/model@{second[:7]}", "--yes", "--json"))
    assert set(gone) == documented_keys("rm") and gone == {"removed": [f"hf:org/model@{second[:7]}"], "bytes": 2}
    assert {each["revision"] for each in document(invoke("list", "--json"))["models"]} & {first, second} == {first}
    assert invoke("inspect", rows[first]["path"]).exit_code == 0  # files that both had are still there
    third = model.commit(files | {"other.json": b"[]"}, "v3")
    assert invoke("inspect", "hf:org/model@v3").exit_code == 0
    both = document(invoke("rm", f"hf:org/model@{first}", f"hf:org/model@{third}", "hf:org/model", "--yes", "--json"))
    assert both["bytes"] == sum(map(len, files.values())) + 2  # what they share is removed with the last of them
    for name in ("hf:org/model@v1", "hf:org/other"):
        assert invoke("inspect", name).exit_code == 0
    result = invoke("rm", "hf:org/model", "hf:org/other", "--yes")
    assert result.exit_code == 0 and result.stdout.startswith("removed: hf:org/model, "), result.stderr
    assert document(invoke("list", "--json")) == {"models": []}


def test_nothing_outside_the_cache_is_removed(hub, packed, tmp_path):
    model = hub.models["org/model"] = Repository()
    commits = [
        model.commit(files_in(packed[0]) | {"more.json": content}, name) for name, content in (("a", b"{}"), ("b", b"[]"))
    ]
    for commit in commits:
        assert invoke("inspect", f"hf:org/model@{commit}").exit_code == 0
    (tmp_path / "mine").write_bytes(b"precious")
    for name in (packed[0], tmp_path / "mine", "../mine", "hf:../mine", "hf:org/model/x.gguf", "org/model"):
        assert "expected hf:org/model" in error(invoke("rm", name, "--yes"))
    for name in ("hf:org/none", "hf:org/model@v7"):
        assert error(invoke("rm", f"hf:org/model@{commits[0]}", name, "--yes")).startswith(f"{name} is not in ")

    (tmp_path / "cache" / "models--org--model" / "snapshots" / commits[0] / "link.json").symlink_to(tmp_path / "mine")
    assert f"{tmp_path / 'mine'}, which is not in" in error(invoke("rm", f"hf:org/model@{commits[0]}", "--yes"))
    assert len(document(invoke("list", "--json"))["models"]) == 2
    assert invoke("rm", "hf:org/model", "--yes").exit_code == 0  # removes the link alone
    assert (tmp_path / "mine").read_bytes() == b"precious" and (packed[0] / "model.safetensors").exists()


def test_damaged_files_of_a_hub_are_refused_as_local_ones(hub, packed):
    files = files_in(packed[0])
    files["model.safetensors"] = files["model.safetensors"][:-100]
    hub.models["org/model"] = Repository()
    hub.models["org/model"].commit(files)
    assert "is not a whole safetensors file" in error(invoke("inspect", "hf:org/model"))


def test_refusals_of_a_hub_are_one_sentence(hub, packed, tmp_path, monkeypatch):
    def refused(name: str) -> str:
        return error(invoke("inspect", name))

    token = "set HF_TOKEN, or run `hf auth login`"
    private = f"there is no org/none on {hub.address}; if it is private, {token}"
    assert refused("hf:org/none") == private
    hub.models["org/model"] = Repository()
    hub.models["org/model"].commit(files_in(packed[0]))
    expected = "has no revision 'v7'; expected a branch, a tag or a commit"
    assert refused("hf:org/model@v7") == f"org/model on {hub.address} {expected}"
    for kind in ("gated", "private"):
        hub.models[f"org/{kind}"] = Repository(**{kind: True})
        hub.models[f"org/{kind}"].commit(files_in(packed[0]))
    assert refused("hf:org/gated") == f"org/gated on {hub.address} is gated: accept its terms in a browser; then {token}"
    assert "there is no org/private" in refused("hf:org/private")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert invoke("inspect", "hf:org/gated").exit_code == 0
    assert invoke("inspect", "hf:org/private").exit_code == 0
    assert refused("hf:org/none").startswith("there is no org/none")


def test_without_a_network(hub, packed, monkeypatch):
    hub.models["org/model"] = Repository()
    hub.models["org/model"].commit(files_in(packed[0]))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    missing = f"hf:org/model is not complete in {constants.HF_HUB_CACHE}"
    assert error(invoke("inspect", "hf:org/model")) == f"{missing}; HF_HUB_OFFLINE forbids downloads"
    assert hub.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    assert error(invoke("inspect", "hf:org/model")) == f"{missing}; {address} cannot be reached"
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    assert invoke("inspect", "hf:org/model").exit_code == 0
    monkeypatch.setattr(constants, "ENDPOINT", address)
    assert invoke("inspect", "hf:org/model").exit_code == 0, "it is in the cache"


def test_push_and_load_again(hub, packed, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    shutil.copytree(packed[0], tmp_path / "model")
    (tmp_path / "model" / ".hidden.json").write_text("{}")
    (tmp_path / "model" / "notes.py").write_text("")
    arguments = [
        "push",
        tmp_path / "model",
        "org/pushed",
        "--base-model",
        "org/float",
        "--license",
        "mit",
        "--private",
        "--json",
    ]
    said = document(result := invoke(*arguments))
    assert result.exit_code == 0, said
    model = hub.models["org/pushed"]
    assert model.private and model.refs["main"] == said["revision"]
    files = dict(model.commits[said["revision"]])
    card = files.pop("README.md").decode()
    assert files.pop(".gitattributes") == b""
    expected = files_in(packed[0])
    del expected["README.md"]  # contains only the note that the checkpoint needs lowbit
    assert files == expected
    assert said["files"] == sorted([*files, "README.md"])
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {
        "library_name": "transformers", "tags": ["lowbit"], "license": "mit", "base_model": "org/float",
        "base_model_relation": "quantized",
    }  # fmt: skip
    assert "| 8 | affine | row | 1 |\n" in card
    assert 'from_pretrained("org/pushed")' in card
    tensors = [json.dumps(document(invoke("inspect", name, "--json"))["tensors"]) for name in ("hf:org/pushed", packed[0])]
    assert tensors[0] == tensors[1]
    (tmp_path / "model" / "README.md").write_text("# Mine\n")
    again = document(invoke(*arguments))
    assert model.commits[again["revision"]]["README.md"] == b"# Mine\n"


def test_files_that_are_not_pushed(hub, packed, tmp_path, monkeypatch):
    assert "cannot be written by this user; set HF_TOKEN" in error(invoke("push", packed[0], "org/model"))
    assert "has no packed weights" in error(invoke("push", FLOAT, "org/model"))
    assert error(invoke("push", packed[0], "model")) == "'model' is not a name on a hub; expected org/model"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    shutil.copytree(packed[0], tmp_path / "damaged")
    data = bytearray((tmp_path / "damaged" / "model.safetensors").read_bytes())
    data[200_000] ^= 1
    (tmp_path / "damaged" / "model.safetensors").write_bytes(data)
    assert "checksum" in error(invoke("push", tmp_path / "damaged", "org/model"))
    assert hub.models == {}


def test_transformers_pushes_a_packed_model(hub, packed, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    transformers.AutoModelForCausalLM.from_pretrained(packed[0]).push_to_hub("org/direct")
    tensors = [document(invoke("inspect", name, "--json"))["tensors"] for name in ("hf:org/direct", packed[0])]
    key = lambda each: each["name"]  # noqa: E731
    assert sorted(tensors[0], key=key) == sorted(tensors[1], key=key)
