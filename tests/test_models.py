import json, os, string, subprocess, sys
import open_clip, pytest, sentencepiece, torch, torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers.activations import GELUTanh
from transformers import (AutoImageProcessor, AutoProcessor, AutoTokenizer, Blip2ForImageTextRetrieval, Blip2Processor, CLIPImageProcessor,
                          CLIPModel, SiglipModel, SiglipTokenizer, T5Tokenizer)
from cs_clip.files import CSClipError
from cs_clip.models import SIGLIP_PICTURES, DualEncoder, load, new_model, tiny_siglip_config, to_transformers, word_tokenizer
from tiny_clip import captions, clip_config, tiny_clip, tiny_siglip, tiny_transformers


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


@pytest.mark.parametrize('name', ['', 'ViT-B-32', 'ViT-B-32/nobody', 'Foo/openai'])
def test_an_unknown_name_is_told_the_forms(name):
    with pytest.raises(CSClipError, match='ARCHITECTURE/TAG.*ARCHITECTURE/FILE.*local-dir:FOLDER.*hf-hub:ORG/NAME'): load(name)


def test_unknown_precision(folder):
    with pytest.raises(CSClipError, match='fp32, bf16, fp16'): load(f'local-dir:{folder/"clip"}', precision='int8')


def test_vocabulary_larger_than_the_table(folder):
    with pytest.raises(CSClipError, match='vocab_size 3'): new_model(clip_config(vocab_size=3), folder/'tokenizer')


# -- one model in every format

PICTURE = Image.effect_noise((50, 40), 80).convert('RGB')
TEXTS = [*captions()[:3], 'a red mug on a cat ' * 9]


def embed(model):
    with torch.no_grad(): return model.encode_image(model.preprocess(PICTURE)[None]), model.encode_text(model.tokenize(TEXTS))


def assert_same(a, b, atol=1e-5):
    for x, y in zip(embed(a), embed(b)): assert torch.allclose(x, y, atol=atol)


@pytest.fixture
def tiny(monkeypatch):
    "A ViT of a few thousand weights and CLIP's tokenizer, known to open_clip with both activations."
    cfg = clip_config('vit', vocab_size=49408)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, 'tiny', {**cfg, 'quick_gelu': False})
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, 'tiny-quickgelu', cfg)
    torch.manual_seed(0)
    return DualEncoder(open_clip.CLIP(**cfg).eval(), cfg, open_clip.SimpleTokenizer(context_length=16))


def openai_state(model):
    "What OpenAI's archives hold: half precision, and three numbers that are no weights."
    sizes = {'input_resolution': 32, 'context_length': 16, 'vocab_size': 49408}
    return {**{k: v.half() for k, v in model.clip.state_dict().items()}, **{k: torch.tensor(v) for k, v in sizes.items()}}


def negclip_state(model):
    optimizer = torch.optim.AdamW(model.clip.parameters())
    return {'epoch': 5, 'name': 'negclip', 'state_dict': {f'module.{k}': v for k, v in model.clip.state_dict().items()},
            'optimizer': optimizer.state_dict()}


FILES = {
    'plain.pt': lambda m, f: torch.save(m.clip.state_dict(), f),
    'old.pth': lambda m, f: torch.save(m.clip.state_dict(), f, _use_new_zipfile_serialization=False),
    'negclip.pt': lambda m, f: torch.save(negclip_state(m), f),
    'w.bin': lambda m, f: torch.save({'state_dict': m.clip.state_dict()}, f),
    'w.safetensors': lambda m, f: save_file(m.clip.state_dict(), f)}


@pytest.mark.parametrize('file', FILES)
def test_every_file_of_weights_gives_the_same_embeddings(tiny, tmp_path, file):
    FILES[file](tiny, tmp_path/file)
    model = load(f'tiny-quickgelu/{tmp_path/file}')
    assert model.digest == tiny.digest and model.model_cfg['quick_gelu']
    assert_same(model, tiny)
    model.save(tmp_path/'saved')
    assert_same(load(f'local-dir:{tmp_path/"saved"}'), tiny)
    other = load(f'tiny-gelu/{tmp_path/file}')
    assert other.digest == tiny.digest and not other.model_cfg['quick_gelu']
    assert not torch.allclose(embed(other)[1], embed(tiny)[1], atol=1e-4)


def test_openais_state_dict_tells_its_activation(tiny, tmp_path):
    torch.save(openai_state(tiny), tmp_path/'w.pt')
    for name in ('tiny', 'tiny-quickgelu'):
        model = load(f'{name}/{tmp_path/"w.pt"}')
        assert model.model_cfg['quick_gelu']
        assert_same(model, tiny, atol=1e-2)
    with pytest.raises(CSClipError, match='tiny-quickgelu/'): load(f'tiny-gelu/{tmp_path/"w.pt"}')


def test_an_activation_that_cannot_be_told_is_asked_for(tiny, tmp_path):
    for file, save in FILES.items():
        save(tiny, tmp_path/file)
        with pytest.raises(CSClipError, match=f'"tiny-quickgelu/{tmp_path/file}".*"tiny-gelu/{tmp_path/file}"'): load(f'tiny/{tmp_path/file}')


def test_a_preprocessing_that_cannot_be_told_is_asked_for(tiny, tmp_path, monkeypatch):
    default = open_clip.get_pretrained_cfg('ViT-B-32', 'laion2b_e16')
    FILES['w.safetensors'](tiny, tmp_path/'w.safetensors')
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, 'tiny', {'a': {**default, 'mean': (.5, .5, .5), 'resize_mode': 'squash'}})
    model = load(f'tiny-gelu/{tmp_path/"w.safetensors"}')
    assert model.preprocess_cfg['mean'] == (.5, .5, .5) and model.preprocess_cfg['resize_mode'] == 'squash'
    open_clip.pretrained._PRETRAINED['tiny']['b'] = default
    with pytest.raises(CSClipError, match='preprocessing.*"a".*"b".*open_clip_config.json'): load(f'tiny-gelu/{tmp_path/"w.safetensors"}')


def test_relative_and_absolute_files(tiny, tmp_path, monkeypatch):
    FILES['plain.pt'](tiny, tmp_path/'plain.pt')
    monkeypatch.chdir(tmp_path)
    assert load('tiny-gelu/plain.pt').digest == load(f'tiny-gelu/{tmp_path}/plain.pt').digest == tiny.digest


def test_custom_text_towers_take_both_layouts(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, 'tiny-quickgelu', {**tiny.model_cfg, 'custom_text': True})
    FILES['plain.pt'](tiny, tmp_path/'old.pt')
    model = load(f'tiny-quickgelu/{tmp_path/"old.pt"}')
    assert_same(model, tiny)
    FILES['plain.pt'](model, tmp_path/'new.pt')
    assert_same(load(f'tiny-quickgelu/{tmp_path/"new.pt"}'), tiny)


class Touch:
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.mkdir, (str(self.path),)


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize('wrap', [lambda s, t: {**s, 'x': t}, lambda s, t: {'state_dict': s, 'args': t}, lambda s, t: t])
def test_pickled_code_is_refused_and_not_run(tiny, tmp_path, zipped, wrap):
    torch.save(wrap(tiny.clip.state_dict(), Touch(tmp_path/'run')), tmp_path/'w.pt', _use_new_zipfile_serialization=zipped)
    with pytest.raises(CSClipError, match='code, and was not loaded'): load(f'tiny-gelu/{tmp_path/"w.pt"}')
    assert not (tmp_path/'run').exists()


def test_pickled_code_in_a_folder_is_refused_and_not_run(model, tmp_path):
    model.save(tmp_path)
    (tmp_path/'open_clip_model.safetensors').unlink()
    torch.save({**model.clip.state_dict(), 'x': Touch(tmp_path/'run')}, tmp_path/'open_clip_pytorch_model.bin')
    with pytest.raises(CSClipError, match='cannot be loaded'): load(f'local-dir:{tmp_path}')
    name = tiny_transformers(tmp_path)
    (tmp_path/'clip/model.safetensors').unlink()
    torch.save({'x': Touch(tmp_path/'run')}, tmp_path/'clip/pytorch_model.bin')
    with pytest.raises(CSClipError, match='cannot be loaded'): load(name)
    assert not (tmp_path/'run').exists()


@pytest.mark.filterwarnings('ignore')
def test_torchscript_is_refused_and_its_remedy_works(tiny, tmp_path):
    del tiny.clip.context_length, tiny.clip.vocab_size  # numbers; in OpenAI's archives they are tensors
    for name, x in openai_state(tiny).items():
        if x.dtype == torch.int64: tiny.clip.register_buffer(name, x)
    mask = tiny.clip.attn_mask
    del tiny.clip.attn_mask
    tiny.clip.attn_mask = mask  # no buffer there
    inputs = {'encode_image': torch.zeros(1, 3, 32, 32), 'encode_text': torch.zeros(1, 16, dtype=torch.long)}
    torch.jit.trace_module(tiny.clip, inputs, check_trace=False).save(tmp_path/'archive.pt')
    with pytest.raises(CSClipError, match='TorchScript.*"ViT-B-32/openai".*torch.save') as e: load(f'tiny/{tmp_path/"archive.pt"}')
    exec(str(e.value).rsplit(': ', 1)[1].replace('"new.pt"', 'tmp_path/"new.pt"'))
    assert_same(load(f'tiny/{tmp_path/"new.pt"}'), tiny)


@pytest.mark.parametrize('change, message', [
    (lambda s: s.pop('ln_final.weight'), 'missing: ln_final.weight$'),
    (lambda s: s.update(extra=torch.zeros(1)), 'unknown: extra$'),
    (lambda s: s.update({'ln_final.weight': torch.zeros(7)}), 'another shape: ln_final.weight$'),
    (lambda s: s.update({'visual.positional_embedding': torch.zeros(17, 32)}), 'another shape: visual.positional_embedding$'),
    (lambda s: [s.pop(k) for k in list(s) if k.startswith('visual.')], 'missing: visual.*more'),
    (lambda s: s.clear(), 'expected a state dict'), (lambda s: s.update(x='text'), 'expected a state dict'),
    (lambda s: s.update({3: torch.zeros(1)}), 'expected a state dict')])
def test_weights_that_do_not_fit(tiny, tmp_path, change, message):
    state = dict(tiny.clip.state_dict())
    change(state)
    torch.save(state, tmp_path/'w.pt')
    with pytest.raises(CSClipError, match=message) as e: load(f'tiny-gelu/{tmp_path/"w.pt"}')
    assert str(tmp_path) in str(e.value)


@pytest.mark.parametrize('file', ['w.pt', 'w.safetensors'])
@pytest.mark.parametrize('content', [b'', b'no weights', b'half'])
def test_broken_files(tiny, tmp_path, file, content):
    if content == b'half':
        FILES['w.safetensors' if file == 'w.safetensors' else 'plain.pt'](tiny, tmp_path/file)
        content = (tmp_path/file).read_bytes()[:5000]
    (tmp_path/file).write_bytes(content)
    with pytest.raises(CSClipError, match=file): load(f'tiny-gelu/{tmp_path/file}')


@pytest.mark.parametrize('name, message', [
    ('tiny-gelu/{}/none.pt', 'no such file'), ('huge/{}/w.pt', 'no architecture "huge"'), ('ViT-B-16-SigLIP-gelu/{}/w.pt', 'no architecture'),
    ('ViT-B-16-SigLIP-quickgelu/{}/w.pt', 'no architecture')])
def test_files_for_no_architecture(tiny, tmp_path, name, message):
    FILES['plain.pt'](tiny, tmp_path/'w.pt')
    with pytest.raises(CSClipError, match=message): load(name.format(tmp_path))


# -- transformers

def rewrite(file, **changes): file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

KINDS = {'clip': CLIPModel, 'siglip': SiglipModel, 'blip-2': Blip2ForImageTextRetrieval}

@pytest.fixture(scope='module')
def names(tmp_path_factory):
    folder = tmp_path_factory.mktemp('transformers')
    return {kind: tiny_transformers(folder, kind) for kind in KINDS}


@pytest.mark.parametrize('kind', ['clip', 'siglip'])
def test_features_are_transformers_own(names, kind):
    folder, model = names[kind].removeprefix('local-dir:'), load(names[kind])
    theirs, processor = KINDS[kind].from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    tokens = processor.tokenizer(TEXTS, padding='max_length', truncation=True, max_length=16, return_tensors='pt')
    if kind == 'siglip': del tokens['attention_mask']  # trained without
    with torch.no_grad():
        image = theirs.get_image_features(**processor.image_processor(PICTURE, return_tensors='pt')).pooler_output
        text = theirs.get_text_features(**tokens).pooler_output
    for ours, x in zip(embed(model), (image, text)):
        assert torch.allclose(ours, F.normalize(x, dim=-1), atol=1e-5) and ours.dtype == torch.float32
    assert torch.allclose(model.similarity(*embed(model)), F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T, atol=1e-5)


@pytest.mark.parametrize('end', [2, None])
def test_cut_transformers_texts_embed_as_uncut_ones(tmp_path, end):
    model = load(tiny_transformers(tmp_path, **{} if end is None else {'eos_token_id': end}))
    tokens = model.tokenize(['a cat', 'a red mug'])
    with torch.no_grad(): whole = F.normalize(model.clip.get_text_features(tokens).pooler_output, dim=-1)
    assert torch.allclose(model.encode_text(tokens), whole, atol=1e-6)


@pytest.mark.parametrize('image_token', [False, True])
def test_both_of_blip_2s_heads_are_transformers(tmp_path, image_token):
    "Older folders have no token for the image; in newer ones the processor writes one for each query, and the model strips them."
    name = tiny_transformers(tmp_path, 'blip-2')
    folder = tmp_path/'blip-2'
    processor = Blip2Processor(AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), 4 if image_token else None)
    (folder/'preprocessor_config.json').unlink()
    processor.save_pretrained(folder)
    if image_token: rewrite(folder/'config.json', image_token_index=processor.tokenizer.convert_tokens_to_ids('<image>'))
    theirs, model = Blip2ForImageTextRetrieval.from_pretrained(folder).eval(), load(name)
    pictures = PICTURE, Image.new('RGB', (40, 40), 'red'), Image.effect_noise((32, 32), 200).convert('RGB')
    pixels = torch.stack([model.preprocess(p) for p in pictures])
    texts = processor(images=[PICTURE]*len(TEXTS), text=TEXTS, padding=True, truncation=True, return_tensors='pt')
    del texts['pixel_values']
    with torch.no_grad():
        images, ours = model.encode_image(pixels), model.encode_text(model.tokenize(TEXTS))
        contrast = theirs(pixel_values=pixels, **texts).logits_per_image
        match = torch.stack([theirs(pixel_values=p.expand(len(TEXTS), -1, -1, -1), **texts, use_image_text_matching_head=True).logits_per_image
                             for p in pixels])
        scores = model.scores(pixels, model.tokenize(TEXTS).expand(3, -1, -1))
    assert images.shape == (3, 4, 16) and torch.allclose(images.norm(dim=-1), torch.ones(3, 4), atol=1e-5)
    assert torch.allclose(model.similarity(images, ours), contrast, atol=1e-5)
    assert scores.shape == (3, 4) and torch.allclose(scores.sigmoid(), match.softmax(-1)[..., 1], atol=1e-5)
    assert scores.std() > 1e-3 < contrast.std()
    with pytest.raises(CSClipError, match='not trained'): model.logit_scale


@pytest.mark.parametrize('name', ['open_clip', 'clip', 'siglip'])
def test_scores_of_a_dual_encoder_are_its_similarities(model, names, name):
    encoder = model if name == 'open_clip' else load(names[name])
    pixels = torch.stack([encoder.preprocess(p) for p in (PICTURE, Image.new('RGB', (40, 40), 'red'))])
    tokens = encoder.tokenize(captions()[:6])
    with torch.no_grad():
        scores = encoder.scores(pixels, tokens.view(2, 3, -1))
        all_pairs = encoder.similarity(encoder.encode_image(pixels), encoder.encode_text(tokens))
    assert torch.allclose(scores, torch.stack([all_pairs[0, :3], all_pairs[1, 3:]]), atol=1e-6)


@pytest.mark.parametrize('kind', KINDS)
def test_a_transformers_folder_saved_again_gives_the_same_embeddings(names, tmp_path, kind):
    model = load(names[kind])
    model.save(tmp_path/'a')
    again = load(f'local-dir:{tmp_path/"a"}')
    assert again.digest == model.digest and again.preprocess_cfg == model.preprocess_cfg and again.tokenize(TEXTS).equal(model.tokenize(TEXTS))
    for x, y in zip(embed(again), embed(model)): assert torch.equal(x, y)
    again.save(tmp_path/'b')
    for file in ('config.json', 'model.safetensors', 'preprocessor_config.json'):
        assert (tmp_path/'a'/file).read_bytes() == (tmp_path/'b'/file).read_bytes()


def as_transformers(state):
    "The weights of an open_clip ViT under transformers' names."
    names = {
        'visual.class_embedding': 'vision_model.embeddings.class_embedding', 'visual.conv1': 'vision_model.embeddings.patch_embedding',
        'visual.positional_embedding': 'vision_model.embeddings.position_embedding.weight', 'visual.proj': 'visual_projection.weight',
        'visual.ln_pre': 'vision_model.pre_layrnorm', 'visual.ln_post': 'vision_model.post_layernorm',
        'visual.transformer.resblocks': 'vision_model.encoder.layers', 'transformer.resblocks': 'text_model.encoder.layers',
        'token_embedding': 'text_model.embeddings.token_embedding', 'positional_embedding': 'text_model.embeddings.position_embedding.weight',
        'ln_final': 'text_model.final_layer_norm', 'text_projection': 'text_projection.weight'}
    inside = {'ln_1': 'layer_norm1', 'ln_2': 'layer_norm2', 'mlp.c_fc': 'mlp.fc1', 'mlp.c_proj': 'mlp.fc2', 'attn.out_proj': 'self_attn.out_proj'}
    out = {}
    for name, x in state.items():
        new = next((b + name.removeprefix(a) for a, b in names.items() if name.startswith(a)), name)
        for a, b in inside.items(): new = new.replace(f'.{a}.', f'.{b}.')
        if name in ('visual.proj', 'text_projection'): x = x.T
        if '.attn.in_proj_' in new: out |= {new.replace('attn.in_proj_', f'self_attn.{k}_proj.'): part for k, part in zip('qkv', x.chunk(3))}
        else: out[new] = x
    return out


def test_the_same_clip_in_transformers_format_embeds_alike(tmp_path):
    name, ours = tiny_transformers(tmp_path), load(tiny_clip(tmp_path/'ours', 'vit', seed=3))
    theirs = load(name)
    theirs.clip.load_state_dict(as_transformers(ours.clip.state_dict()))
    theirs.save(tmp_path/'again')
    again = load(f'local-dir:{tmp_path/"again"}')
    pixels = ours.preprocess(PICTURE)[None]  # the libraries resize a little differently
    assert torch.allclose(again.encode_image(pixels), ours.encode_image(pixels), atol=1e-5)
    assert torch.allclose(embed(again)[1], embed(ours)[1], atol=1e-5)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('precision', ['bf16', 'fp16'])
def test_low_precision_of_transformers(names, kind, precision):
    model, low = load(names[kind]), load(names[kind], precision=precision)
    for x, y in zip(embed(model), embed(low)):
        assert y.dtype == torch.float32 and F.cosine_similarity(x, y, dim=-1).min() > .99
    if kind == 'blip-2': assert low.scores(low.preprocess(PICTURE)[None], low.tokenize(TEXTS)[None]).dtype == torch.float32


def drop_weight(folder, add=()):
    state = load_file(folder/'model.safetensors')
    del state['logit_scale']
    save_file({**state, **dict(add)}, folder/'model.safetensors', {'format': 'pt'})

@pytest.mark.parametrize('damage, message', [
    (lambda f: (f/'config.json').unlink(), 'open_clip_config.json .open_clip. not found, nor config.json'),
    (lambda f: (f/'config.json').write_text('{"mod'), 'broken JSON'),
    (lambda f: (f/'config.json').write_text('[]'), 'model_type'),
    (lambda f: rewrite(f/'config.json', model_type='bert'), "'bert'; expected one of clip, siglip, blip-2"),
    (lambda f: rewrite(f/'config.json', model_type='siglip'), 'not the weights of a SiglipModel|cannot be loaded'),
    (lambda f: drop_weight(f), 'not the weights of a CLIPModel: missing: logit_scale$'),
    (lambda f: drop_weight(f, {'logit_scaled': torch.ones(())}), 'missing: logit_scale; unknown: logit_scaled$'),
    (lambda f: (f/'model.safetensors').unlink(), 'cannot be loaded'),
    (lambda f: (f/'model.safetensors').write_bytes((f/'model.safetensors').read_bytes()[:9000]), 'cannot be loaded'),
    (lambda f: (f/'preprocessor_config.json').unlink(), 'preprocessor_config.json'),
    (lambda f: CLIPImageProcessor().save_pretrained(f), 'makes pictures of .224, 224. pixels.*image_size 32'),
    (lambda f: (f/'tokenizer.json').unlink(), 'tokenizer'),
    (lambda f: [(f/n).unlink() for n in ('tokenizer.json', 'tokenizer_config.json')], 'tokenizer'),
    (lambda f: rewrite(f/'tokenizer_config.json', tokenizer_class='SiglipTokenizer'), 'SentencePiece|cannot be loaded')])
def test_damaged_transformers_folders_are_named(tmp_path, damage, message):
    name = tiny_transformers(tmp_path)
    damage(tmp_path/'clip')
    with pytest.raises(CSClipError, match=message) as e: load(name)
    assert str(tmp_path) in str(e.value)


def test_a_folders_own_code_is_not_run(tmp_path):
    name = tiny_transformers(tmp_path)
    (tmp_path/'clip/mine.py').write_text(f'import os; os.mkdir({str(tmp_path/"run")!r})')
    for file, auto in ('tokenizer_config.json', 'AutoTokenizer'), ('preprocessor_config.json', 'AutoImageProcessor'), ('config.json', 'AutoModel'):
        rewrite(tmp_path/'clip'/file, auto_map={auto: 'mine.Mine'})
    load(name)
    assert not (tmp_path/'run').exists()


@pytest.mark.parametrize('words, message', [(90, 'has 93 tokens.*vocab_size 64'), (3, 'does not write the end token')])
def test_a_tokenizer_of_another_model(tmp_path, words, message):
    name = tiny_transformers(tmp_path)
    word_tokenizer([f'w{i}' for i in range(words)], tmp_path/'clip')
    with pytest.raises(CSClipError, match=message): load(name)


def test_siglips_own_tokenizer(tmp_path):
    "Of SigLIPs in transformers' form, such as google/siglip-base-patch16-224: sentencepiece's. It lowers case, drops punctuation, pads with the end token to the tower's length."
    name = tiny_transformers(tmp_path, 'siglip')
    (tmp_path/'captions.txt').write_text('\n'.join(captions()))
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path/'captions.txt'), model_prefix=str(tmp_path/'spiece'), vocab_size=27,
                                             bos_id=-1, pad_id=0, eos_id=1, unk_id=2)
    (tmp_path/'siglip/tokenizer.json').unlink()
    SiglipTokenizer(str(tmp_path/'spiece.model'), model_max_length=16).save_pretrained(tmp_path/'siglip')
    tokens = load(name).tokenize(['A RED, cat!', 'a red cat', 'a red cat ' * 20])
    assert tokens.shape == (3, 16) and tokens[0].equal(tokens[1]) and (tokens[:, -1] == 1).all() and (tokens[0] == 1).sum() > 1


@pytest.mark.parametrize('kind', ['clip', 'siglip'])
def test_transformers_models_can_be_trained(names, kind):
    model = load(names[kind])
    image, text = model(model.preprocess(PICTURE)[None], model.tokenize(TEXTS[:1]))
    (model.logit_scale.exp()*(image @ text.T)).sum().backward()
    assert model.logit_scale.grad.abs().sum() > 0 and sum(p.grad is not None for p in model.parameters()) > 50


# -- the hub

def test_hub_repositories_of_both_libraries(model, names, tmp_path):
    "From a cache laid out as the hub's, in a process of its own: where the cache lies is read once."
    model.save(tmp_path/'open_clip')
    (tmp_path/'torn').mkdir()
    (tmp_path/'torn/open_clip_config.json').write_bytes((tmp_path/'open_clip/open_clip_config.json').read_bytes())
    for name, source in ('open', tmp_path/'open_clip'), ('torn', tmp_path/'torn'), ('siglip', names['siglip'].removeprefix('local-dir:')):
        snapshot = tmp_path/'hub'/f'models--org--{name}'
        (snapshot/'refs').mkdir(parents=True)
        (snapshot/'refs/main').write_text('0'*40)
        (snapshot/'snapshots').mkdir()
        (snapshot/'.no_exist'/('0'*40)).mkdir(parents=True)  # what the hub was asked for and does not have
        for file in ['open_clip_config.json'] if name == 'siglip' else ['config.json']: (snapshot/'.no_exist'/('0'*40)/file).touch()
        os.symlink(source, snapshot/'snapshots'/('0'*40))
    rewrite(tmp_path/'open_clip/open_clip_config.json', model_cfg={
        **model.model_cfg, 'text_cfg': {**model.model_cfg['text_cfg'], 'hf_tokenizer_name': 'org/open'}})
    code = ('import sys, torch; from cs_clip.models import load\n'
            'for name in "open", "siglip":\n'
            '    m = load(f"hf-hub:org/{name}"); print(m.digest, m.encode_text(m.tokenize(["a red cat"]))[0, 0].item())\n'
            'for name in "none", "torn":\n'
            '    try: load(f"hf-hub:org/{name}")\n'
            '    except ValueError as e: print(e)\n')
    out = subprocess.run([sys.executable, '-c', code], env={**os.environ, 'HF_HOME': str(tmp_path), 'HF_HUB_OFFLINE': '1'},
                         capture_output=True, text=True, check=True).stdout.splitlines()
    for line, m in zip(out, (model, load(names['siglip']))):
        name, x = line.split()
        assert name == m.digest and float(x) == pytest.approx(m.encode_text(m.tokenize(['a red cat']))[0, 0].item(), abs=1e-5)
    assert out[2].startswith('hf-hub:org/none: neither open_clip_config.json nor config.json')
    assert out[3].startswith('hf-hub:org/torn: cannot be loaded')


# ---- SigLIP: tokens, and transformers' form
@pytest.fixture(scope='module')
def siglip(tmp_path_factory):
    return load(tiny_siglip(tmp_path_factory.mktemp('siglip')))

def test_a_token_alone_is_the_pooled_output(siglip):
    pixels = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        states = siglip.visual_states(pixels)
        assert torch.equal(siglip.pool(states), siglip.encode_image(pixels))
        for token in states.unbind(1)[:5]: assert torch.equal(siglip.token_features(token[:, None])[:, 0], siglip.pool(token[:, None]))
        images, texts, features = siglip(pixels, siglip.tokenize(['a red mug']), True)
    assert features.shape == (3, 64, 128) and torch.allclose(features.norm(dim=-1), torch.ones(3, 64), atol=1e-5)
    assert torch.equal(images, siglip.encode_image(pixels)) and len(siglip(pixels, siglip.tokenize(['a red mug']))) == 2


def test_token_features_are_the_value_path(siglip):
    "Value projection, output projection, and the MLP of the norm beside it, as recipe and paper say; query and key do not matter."
    pool, pixels = siglip.clip.visual.trunk.attn_pool, torch.randn(2, 3, 64, 64)
    states = siglip.visual_states(pixels)
    value = pool.kv(states)[..., states.shape[-1]:]
    x = pool.proj(value)
    assert torch.allclose(siglip.token_features(states), torch.nn.functional.normalize(x + pool.mlp(pool.norm(x)), dim=-1), atol=1e-6)
    siglip.token_features(states).sum().backward()
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in (pool.latent, pool.q.weight)) and pool.proj.weight.grad.abs().max() > 0
    siglip.zero_grad()


def test_models_without_tokens_say_so(tmp_path):
    for name in tiny_clip(tmp_path/'resnet'), tiny_clip(tmp_path/'vit', 'vit'), tiny_transformers(tmp_path/'hf'):
        model = load(name)
        with pytest.raises(CSClipError, match='attention pooling'): model(torch.zeros(1, 3, 32, 32), model.tokenize(['a mug']), True)
        with pytest.raises(CSClipError, match='attention pooling'): model.visual_states(torch.zeros(1, 3, 32, 32))


def test_a_saved_siglip_is_plain_open_clips_and_transformers(siglip, tmp_path):
    from transformers import SiglipVisionModel
    with torch.no_grad():
        for p in siglip.parameters(): p += .02*torch.randn_like(p)  # biases and norms are no zeros and ones any more
    siglip.save(tmp_path/'open_clip')
    theirs, _, preprocess = open_clip.create_model_and_transforms(f'local-dir:{tmp_path/"open_clip"}')
    to_transformers(siglip).save(tmp_path/'transformers')
    again, vision = load(f'local-dir:{tmp_path/"transformers"}'), SiglipVisionModel.from_pretrained(tmp_path/'transformers').eval()
    picture = Image.effect_noise((64, 64), 90).convert('RGB')
    pixels, texts = siglip.preprocess(picture)[None], ['a red mug next to a cat', '', 'dog ' * 99]
    tokens = siglip.tokenize(texts)
    assert torch.equal(preprocess(picture)[None], pixels) and torch.allclose(again.preprocess(picture)[None], pixels, atol=1e-5)
    assert torch.equal(again.tokenize(texts), tokens)
    assert isinstance(again.clip, SiglipModel) and isinstance(theirs, open_clip.CustomTextCLIP)
    with torch.no_grad():
        image, text = siglip.encode_image(pixels), siglip.encode_text(tokens)
        assert torch.allclose(theirs.eval().encode_image(pixels, normalize=True), image, atol=1e-5)
        assert torch.allclose(theirs.encode_text(tokens, normalize=True), text, atol=1e-5)
        assert torch.allclose(again.encode_image(pixels), image, atol=1e-5) and torch.allclose(again.encode_text(tokens), text, atol=1e-5)
        assert torch.allclose(torch.nn.functional.normalize(vision(pixels).pooler_output, dim=-1), image, atol=1e-5)
        logits = again.clip(input_ids=tokens, pixel_values=pixels).logits_per_image
        assert torch.allclose(logits, theirs.get_logits(pixels, tokens)[0], atol=1e-4)
        assert torch.allclose(again(pixels, tokens, True)[2], siglip(pixels, tokens, True)[2], atol=1e-5)


def test_the_papers_siglip_converts():
    "ViT-B-16-SigLIP's own architecture, without its numbers: every weight finds its place and none is left."
    from cs_clip.models import _siglip_state
    with torch.device('meta'): clip = open_clip.create_model('ViT-B-16-SigLIP', load_weights=False, device='meta')
    from transformers import SiglipConfig
    with torch.device('meta'): hf = SiglipModel(SiglipConfig())
    ours, theirs = _siglip_state(clip), hf.state_dict()
    assert {k: x.shape for k, x in ours.items()} == {k: x.shape for k, x in theirs.items()}


def test_only_a_siglip_converts(tmp_path):
    for name in tiny_clip(tmp_path), tiny_transformers(tmp_path, 'siglip'):
        with pytest.raises(CSClipError, match='no SigLIP'): to_transformers(load(name))


def siglip_of(folder, cfg=None, pictures=(), **text):
    "An untrained SigLIP with weights of no special values."
    cfg = cfg or tiny_siglip_config(64, 16, 1)
    word_tokenizer(captions(), folder/'tokenizer', 16)
    torch.manual_seed(0)
    model = new_model({**cfg, 'text_cfg': {**cfg['text_cfg'], **text}}, folder/'tokenizer', {**SIGLIP_PICTURES, **dict(pictures)})
    with torch.no_grad():
        for x in model.parameters(): x += .02*torch.randn_like(x)
    return model

@pytest.mark.parametrize('differs, message', [
    (dict(pictures={'resize_mode': 'shortest'}), "the pictures' resize_mode is shortest; expected squash"),
    (dict(pictures={'interpolation': 'random'}), "the pictures' interpolation is random; expected bicubic or bilinear"),
    (dict(no_causal_mask=False), "the text tower's attention is causal; expected open"),
    (dict(pool_type='first'), "the text tower's pooling is first; expected last"),
    (dict(tokenizer_kwargs={'strip_sep_token': True}), "the tokenizer's strip_sep_token is True; expected False"),
    (dict(tokenizer_mode='clips'), "the tokenizer's mode is clips; expected standard")])
def test_what_transformers_has_not_is_refused(tmp_path, differs, message):
    with pytest.raises(CSClipError, match=f'^to_transformers: {message}, as transformers has it$'): to_transformers(siglip_of(tmp_path, **differs))


def test_what_is_put_into_a_model_later_is_refused(tmp_path):
    def refused(message):
        with pytest.raises(CSClipError, match=message): to_transformers(model)
    model = siglip_of(tmp_path)
    model.tokenizer.clean_fn = str.upper
    refused("the tokenizer's cleaning is upper; expected _clean_whitespace or _clean_lower or _clean_canonicalize")
    model.tokenizer = open_clip.get_tokenizer('ViT-B-32')
    refused('the tokenizer is SimpleTokenizer; expected HFTokenizer')
    model = siglip_of(tmp_path)
    model.clip.visual.trunk.blocks[0].mlp.act = torch.nn.GELU(approximate='tanh')
    refused("the image tower's activation is gelu and gelu_pytorch_tanh")
    model = siglip_of(tmp_path)
    model.clip.visual.head.proj = torch.nn.Linear(128, 128)
    model.clip.visual.trunk.blocks[0].ls1 = torch.nn.Linear(1, 1)
    refused('not the weights of a SiglipModel: unknown: vision_model.encoder.layers.0.ls1')


TEXTS_TO_CLEAN = ['A RED, cat!', ' a  red\tcat\n', 'a_red_cat', 'A "mug" (next) to-a dog.', string.punctuation, '', 'É a İ cat', 'cat ' * 40]

@pytest.mark.parametrize('clean', ['whitespace', 'lower', 'canonicalize'])
@pytest.mark.parametrize('kind', ['words', 't5'])
def test_cleaning_becomes_the_tokenizers(tmp_path, clean, kind):
    "Whatever class the tokenizer had: T5's, which real SigLIPs have, would put its own normalizer in place of it when it is loaded."
    model = siglip_of(tmp_path, tokenizer_kwargs={'clean': clean})
    if kind == 't5':
        pieces = ['<pad>', '</s>', '<unk>', *(f'▁{w}' for w in ('a', 'red', 'cat', 'Red', 'mug')), '▁', *string.ascii_letters]
        model.tokenizer.tokenizer = T5Tokenizer(vocab=[(p, -float(i)) for i, p in enumerate(pieces)], extra_ids=0, pad_token='</s>')
    expected = model.tokenize(TEXTS_TO_CLEAN)
    before = model.tokenizer.tokenizer.backend_tokenizer.to_str()
    to_transformers(model).save(tmp_path/'hf')
    for tokenizer in to_transformers(model).tokenizer, AutoTokenizer.from_pretrained(tmp_path/'hf'):
        assert tokenizer(TEXTS_TO_CLEAN, padding='max_length', truncation=True, return_tensors='pt').input_ids.equal(expected)
    assert model.tokenizer.tokenizer.backend_tokenizer.to_str() == before
    assert (expected[0].equal(expected[1]) and expected[0].equal(expected[2])) == (clean == 'canonicalize')


@pytest.mark.parametrize('interpolation', ['bicubic', 'bilinear'])
def test_pictures_are_sized_alike(tmp_path, interpolation):
    "The libraries round otherwise, by a grey level or two of 255; mean and deviation are the model's own."
    model = siglip_of(tmp_path, pictures={'interpolation': interpolation, 'mean': [.1, .4, .7], 'std': [.2, .5, .9]})
    picture = Image.effect_noise((150, 90), 80).convert('RGB')
    ours, theirs = model.preprocess(picture), to_transformers(model).preprocess(picture)
    assert ((ours - theirs)*torch.tensor([.2, .5, .9])[:, None, None]).abs().max() < 2.5/255


@pytest.mark.parametrize('approximate', ['none', 'tanh'])
def test_either_gelu_is_kept(tmp_path, approximate):
    "timm's own class among them, which the larger SigLIPs have."
    model = siglip_of(tmp_path, act_kwargs={'approximate': approximate})
    for module in model.clip.visual.modules():
        if approximate == 'tanh' and isinstance(getattr(module, 'act', None), torch.nn.GELU): module.act = GELUTanh()
    again, pixels, tokens = to_transformers(model), torch.randn(2, 3, 64, 64), model.tokenize(captions()[:3])
    for x, y in zip(model(pixels, tokens), again(pixels, tokens)): assert torch.allclose(x, y, atol=1e-6)


ALONE = """import sys, torch
sys.modules['cs_clip'] = None # importing it is an error
given = torch.load(sys.argv[1])
norm = torch.nn.functional.normalize
with torch.no_grad():
"""

def alone(tmp_path, code, *args, **given):
    "What code says that cannot import this package, of tensors it is given."
    torch.save(given, tmp_path/'given.pt')
    done = subprocess.run([sys.executable, '-c', ALONE + code, tmp_path/'given.pt', *args], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path/'out.pt')

def test_a_saved_siglip_needs_open_clip_alone(tmp_path):
    "With a tower of timm's own; one that is registered here asks for this package, as `save` says."
    cfg = tiny_siglip_config(64, 16, 1, 'test_vit3')
    cfg['vision_cfg']['image_size'] = 160 # the tower's own
    model = siglip_of(tmp_path, cfg)
    model.save(tmp_path/'saved')
    pixels, texts = torch.randn(2, 3, 160, 160), captions()[:3]
    code = """    import open_clip
    model, name = open_clip.create_model(sys.argv[2], load_weights=True).eval(), sys.argv[2]
    texts = open_clip.get_tokenizer(name)(given['texts'])
    torch.save([model.encode_image(given['pixels'], normalize=True), model.encode_text(texts, normalize=True)], 'out.pt')"""
    for x, y in zip(alone(tmp_path, code, f'local-dir:{tmp_path/"saved"}', pixels=pixels, texts=texts), model(pixels, model.tokenize(texts))):
        assert torch.allclose(x, y, atol=1e-5)
    siglip_of(tmp_path).save(tmp_path/'ours')
    with pytest.raises(AssertionError, match='Unknown model'): alone(tmp_path, code, f'local-dir:{tmp_path/"ours"}', pixels=pixels, texts=texts)


def test_its_other_form_needs_transformers_alone(tmp_path):
    model = siglip_of(tmp_path)
    to_transformers(model).save(tmp_path/'hf')
    pixels, texts = torch.randn(2, 3, 64, 64), captions()[:3]
    code = """    from transformers import AutoTokenizer, SiglipModel, SiglipVisionModel
    model, vision = (kind.from_pretrained(sys.argv[2]).eval() for kind in (SiglipModel, SiglipVisionModel))
    tokens = AutoTokenizer.from_pretrained(sys.argv[2])(given['texts'], padding='max_length', return_tensors='pt').input_ids
    out = model.get_image_features(given['pixels']), model.get_text_features(tokens), vision(given['pixels'])
    torch.save([norm(x.pooler_output, dim=-1) for x in out], 'out.pt')"""
    image, text = model(pixels, model.tokenize(texts))
    for x, y in zip(alone(tmp_path, code, tmp_path/'hf', pixels=pixels, texts=texts), (image, text, image)): assert torch.allclose(x, y, atol=1e-5)
