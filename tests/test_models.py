import json
import open_clip, pytest, torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from cs_clip.files import CSClipError
from cs_clip.models import DualEncoder, load, new_model, word_tokenizer
from tiny_clip import captions, clip_config, tiny_clip


@pytest.fixture(scope='module')
def folder(tmp_path_factory): return tmp_path_factory.mktemp('clip')

@pytest.fixture(scope='module')
def model(folder): return load(tiny_clip(folder))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(max_size=80), min_size=1, max_size=5))
def test_cut_texts_embed_as_uncut_ones(model, texts):
    tokens = model.tokenize(texts)
    with torch.no_grad():
        ours, whole = model.encode_text(tokens), model.clip.encode_text(tokens, normalize=True)
    assert (ours - whole).abs().max() < 1e-6


def test_cut_gradients_equal_uncut_ones(model):
    tokens = model.tokenize(captions()[:4])
    grads = []
    for encode in (model.encode_text, lambda t: model.clip.encode_text(t, normalize=True)):
        model.zero_grad()
        encode(tokens)[:, 0].sum().backward()
        grads.append(model.clip.positional_embedding.grad.clone())
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('text', [
    {'no_causal_mask': True}, {'pool_type': 'last', 'no_causal_mask': True}, {'pool_type': 'eos', 'eos_id': 15}, {'pool_type': 'last'}])
@pytest.mark.parametrize('custom', [False, True])
def test_every_kind_of_text_tower(folder, text, custom):
    if text.get('no_causal_mask') and not custom: pytest.skip('open_clip builds bidirectional text towers as custom text only')
    cfg = {**clip_config(**text), 'custom_text': custom}
    model = new_model(cfg, folder/'tokenizer')
    tokens = model.tokenize(captions()[:3])
    assert torch.allclose(model.encode_text(tokens), model.clip.encode_text(tokens, normalize=True), atol=1e-6)


def test_embeddings_are_open_clips(folder, model):
    theirs, _, preprocess = open_clip.create_model_and_transforms(f'local-dir:{folder/"clip"}')
    theirs.eval()
    picture = Image.effect_noise((50, 40), 80).convert('RGB')
    tokens = open_clip.get_tokenizer(f'local-dir:{folder/"clip"}')(captions())
    with torch.no_grad():
        assert torch.equal(model.encode_image(model.preprocess(picture)[None]), theirs.encode_image(preprocess(picture)[None], normalize=True))
        assert torch.allclose(model.encode_text(model.tokenize(captions())), theirs.encode_text(tokens, normalize=True), atol=1e-6)


def test_saving_and_loading_keeps_weights_tokens_and_activation(model, tmp_path):
    model.save(tmp_path/'a')
    again = load(f'local-dir:{tmp_path/"a"}')
    again.save(tmp_path/'b')
    assert again.digest == model.digest
    assert again.tokenize(captions()).equal(model.tokenize(captions()))
    assert json.loads((tmp_path/'a/open_clip_config.json').read_text())['model_cfg']['quick_gelu'] is True
    for name in ('open_clip_config.json', 'open_clip_model.safetensors'):
        assert (tmp_path/'a'/name).read_bytes() == (tmp_path/'b'/name).read_bytes()


def test_digest_names_the_weights(model, tmp_path):
    model.save(tmp_path)
    other = load(f'local-dir:{tmp_path}')
    with torch.no_grad(): next(other.parameters()).view(-1)[0] += 1e-3
    assert other.digest != model.digest


def test_bpe_models_are_saved_without_tokenizer_files(tmp_path):
    cfg = clip_config(vocab_size=49408)
    clip = open_clip.CLIP(**cfg)
    model = DualEncoder(clip.eval(), cfg, open_clip.SimpleTokenizer(context_length=16))
    model.save(tmp_path)
    again = load(f'local-dir:{tmp_path}')
    tokens = again.tokenize(['a cat', 'a red mug ' * 50])
    assert torch.allclose(again.encode_text(tokens), clip.encode_text(tokens, normalize=True), atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['open_clip_config.json', 'open_clip_model.safetensors']


def test_openai_names_keep_quick_gelu(monkeypatch, tmp_path):
    name = 'ViT-B-32/openai'
    small = {**clip_config('vit', vocab_size=49408), 'quick_gelu': False}
    torch.save(open_clip.CLIP(**small).state_dict(), tmp_path/'weights.pt')
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, 'ViT-B-32', small)
    monkeypatch.setattr(open_clip.factory, 'download_pretrained', lambda *a, **k: str(tmp_path/'weights.pt'))
    model = load(name)
    assert model.model_cfg['quick_gelu'] is True
    model.save(tmp_path/'saved')
    again, tokens = load(f'local-dir:{tmp_path/"saved"}'), model.tokenize(['a cat'])
    assert torch.equal(model.encode_text(tokens), again.encode_text(tokens))
    plain = open_clip.CLIP(**small)
    plain.load_state_dict(model.clip.state_dict())
    assert not torch.allclose(model.encode_text(tokens), plain.eval().encode_text(tokens, normalize=True), atol=1e-4)


def test_low_precision_weights_give_float32_embeddings(folder, model):
    low = load(f'local-dir:{folder/"clip"}', precision='bf16')
    x = low.encode_text(low.tokenize(['a red cat next to a dog']))
    assert x.dtype == torch.float32
    assert (x @ model.encode_text(model.tokenize(['a red cat next to a dog'])).T).item() > .99


def test_tokens_of_odd_texts(model):
    tokens = model.tokenize(['', '🐈 猫 на столе', 'a cat ' * 5000, 'A  RED\nmug.'])
    assert tokens.shape == (4, 16)
    end = tokens.max()
    assert (tokens.max(-1).values == end).all() and tokens.tolist()[0][:2] == [2, end]
    assert tokens[3].equal(model.tokenize(['a red mug.'])[0])


def test_tokenizer_is_the_same_whatever_the_captions_order(tmp_path):
    for name, texts in (('a', captions()), ('b', captions()[::-1])): word_tokenizer(texts, tmp_path/name)
    assert (tmp_path/'a/tokenizer.json').read_bytes() == (tmp_path/'b/tokenizer.json').read_bytes()


@pytest.mark.parametrize('damage, message', [
    (lambda f: (f/'open_clip_config.json').unlink(), 'not found'),
    (lambda f: (f/'open_clip_config.json').write_text('{"model_cfg": {}}'), 'embed_dim'),
    (lambda f: (f/'open_clip_config.json').write_text('{"model'), 'broken JSON'),
    (lambda f: (f/'open_clip_model.safetensors').unlink(), 'cannot be loaded'),
    (lambda f: (f/'open_clip_model.safetensors').write_bytes((f/'open_clip_model.safetensors').read_bytes()[:5000]), 'cannot be loaded'),
    (lambda f: (f/'tokenizer_config.json').unlink(), 'names a tokenizer'),
    (lambda f: (f/'open_clip_config.json').write_text(
        (f/'open_clip_config.json').read_text().replace('"vocab_size": 64', '"vocab_size": 65')), 'cannot be loaded')])
def test_damaged_folders_are_named(model, tmp_path, damage, message):
    model.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CSClipError, match=message) as e: load(f'local-dir:{tmp_path}')
    assert str(tmp_path) in str(e.value)


@pytest.mark.parametrize('name', ['', 'ViT-B-32', 'ViT-B-32/', 'Foo/openai', 'local-dir:', 'local-dir:/nowhere'])
def test_unknown_names(name):
    with pytest.raises(CSClipError): load(name)


def test_unknown_precision(folder):
    with pytest.raises(CSClipError, match='fp32, bf16, fp16'): load(f'local-dir:{folder/"clip"}', precision='int8')


def test_vocabulary_larger_than_the_table(folder):
    with pytest.raises(CSClipError, match='vocab_size 3'): new_model(clip_config(vocab_size=3), folder/'tokenizer')
