import dataclasses, json, math, os, re, shutil, signal, subprocess, sys, time
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq, pytest, torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from cs_clip import training
from cs_clip.data import ImageStore, Pixels, Records, batch_indices
from cs_clip.files import CSClipError
from cs_clip.models import load
from cs_clip.objectives import OBJECTIVES, ClipFT, SceneGraphs, own_parameters
from cs_clip.training import LOOP, VALUES, DivergedError, learning_rate, make_optimizer, run_parameters, train, train_run
from tiny_clip import png, tiny_clip, tiny_images, tiny_records, tiny_siglip, tiny_transformers

SCRIPT = Path(__file__).parent/'train_script.py'

@pytest.fixture(scope='module')
def world(tmp_path_factory):
    "Folder with a convolutional and a transformer CLIP, a SigLIP, and pictures."
    folder = tmp_path_factory.mktemp('world')
    tiny_images(folder/'images')
    return {'resnet': tiny_clip(folder/'resnet'), 'vit': tiny_clip(folder/'vit', 'vit'), 'siglip': tiny_siglip(folder/'siglip'), 'images': str(folder/'images')}

def base_of(method, base='resnet'): return 'siglip' if OBJECTIVES[method].sigmoid else base

def run(world, out, method='sg', records=None, own=None, base='resnet', mean=None, base_model=None, **parameters):
    model = base_model or load(world[base_of(method, base)])
    if mean: model.preprocess_cfg['mean'] = mean
    objective = OBJECTIVES[method](records or tiny_records(), **(own or {}))
    parameters = {'steps': 12, 'batch_size': 8, 'lr': 1e-3, 'warmup': 2, 'checkpoint_every': 5, **parameters}
    return train(objective, model, Pixels(ImageStore(world['images']), model.preprocess, keep=True), out, **parameters), model

def weights(out): return (Path(out)/'open_clip_model.safetensors').read_bytes()


# ---- schedule and optimizer
@given(st.integers(0, 20), st.integers(1, 100), st.floats(1e-7, 1))
def test_rate_rises_then_falls(warmup, rest, base):
    total = warmup + rest
    rates = [learning_rate(s, base, warmup, total) for s in range(total)]
    assert all(0 < r <= base*(1 + 1e-12) for r in rates)
    assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == base and (warmup == 0 or rates[warmup - 1] == pytest.approx(base))


def test_the_rate_of_a_run_warms_up_and_decays(world, tmp_path):
    rows, _ = run(world, tmp_path, steps=12, warmup=4, lr=1e-3)
    rates = [r['lr'] for r in rows]
    assert rates[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3]) and rates[4] == 1e-3
    assert rates[4:] == pytest.approx([1e-3*(1 + math.cos(math.pi*k/8))/2 for k in range(8)])


@pytest.mark.parametrize('tune', ['text', 'image'])
@pytest.mark.parametrize('base', ['resnet', 'vit'])
def test_a_tower_alone_learns(world, tmp_path, tune, base):
    before = {k: v.clone() for k, v in load(world[base]).clip.state_dict().items()}
    rows, model = run(world, tmp_path, base=base, tune=tune)
    changed = {k.split('.')[0] == 'visual' for k, v in model.clip.state_dict().items() if not torch.equal(v, before[k]) and k != 'logit_scale'}
    assert changed == {tune == 'image'} and rows[-1]['logit_scale'] != rows[0]['logit_scale']
    assert model.clip.logit_scale.requires_grad


def test_only_matrices_decay(world):
    model = load(world['resnet'])
    decayed, free = make_optimizer(model, .1, (.9, .98)).param_groups
    assert all(p.ndim >= 2 for p in decayed['params']) and all(p.ndim < 2 for p in free['params'])
    assert (decayed['weight_decay'], free['weight_decay']) == (.1, 0)
    assert sum(len(g['params']) for g in (decayed, free)) == len(list(model.parameters()))
    assert any(p is model.logit_scale for p in free['params'])


# ---- the loop
@pytest.mark.parametrize('method', OBJECTIVES)
def test_every_method_trains_logs_and_saves(world, tmp_path, method):
    rows, model = run(world, tmp_path, method)
    assert [r['step'] for r in rows] == list(range(12))
    assert rows == [json.loads(line) for line in (tmp_path/'log.jsonl').read_text().splitlines()]
    assert all(abs(r['loss'] - sum(r.get(k, 0) for k in ('info_nce', 'hinge', 'negclip', 'unit', 'sigmoid', 'npc', 'xac'))) < 1e-5 for r in rows)
    assert load(f'local-dir:{tmp_path}').digest == model.digest != load(world[base_of(method)]).digest
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        'log.jsonl', 'open_clip_config.json', 'open_clip_model.safetensors', 'tokenizer.json', 'tokenizer_config.json', 'training.json']
    facts = json.loads((tmp_path/'training.json').read_text())
    assert facts['parameters']['method'] == method and facts['model'] == model.digest


def test_seeds_decide_everything(world, tmp_path):
    for name, seed in (('a', 0), ('b', 0), ('c', 1)): run(world, tmp_path/name, 'negclip', seed=seed)
    assert weights(tmp_path/'a') == weights(tmp_path/'b') != weights(tmp_path/'c')


def test_a_step_is_torchs_own(world, tmp_path):
    "One step of ours against the same written out with open_clip and torch."
    _, ours = run(world, tmp_path, 'clip_ft', tiny_records(6), {'symmetric': True}, steps=1, weight_decay=0., warmup=0, grad_clip=None)
    model = load(world['resnet']).to(memory_format=torch.channels_last)  # rounding as in ours: Adam's first step magnifies it
    store, objective = ImageStore(world['images']), ClipFT(tiny_records(6))
    batch = objective.sample(batch_indices(len(objective.items), 8, 0, 0), None)
    model.train()
    image, text = model(torch.stack([model.preprocess(store.open(n)) for n in batch.images]), model.tokenize(batch.texts))
    image, text = image[batch.rows['image']], text[batch.rows['text']]
    logits = model.logit_scale.exp()*image @ text.T
    same = batch.same_image() & ~torch.eye(8, dtype=torch.bool)
    logits_i, logits_t, own = logits.masked_fill(same, -1e9), logits.T.masked_fill(same, -1e9), torch.arange(8)
    ((torch.nn.functional.cross_entropy(logits_i, own) + torch.nn.functional.cross_entropy(logits_t, own))/2).backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(.9, .98), eps=1e-6, weight_decay=0.).step()
    for a, b in zip(ours.parameters(), model.parameters()): assert torch.allclose(a, b, atol=2e-5)


def test_worker_processes_change_nothing(world, tmp_path):
    run(world, tmp_path/'a', steps=4)
    run(world, tmp_path/'b', steps=4, workers=2)
    assert weights(tmp_path/'a') == weights(tmp_path/'b')


def test_bf16_trains_fp32_weights(world, tmp_path):
    rows, model = run(world, tmp_path, precision='bf16')
    assert all(p.dtype == torch.float32 for p in model.parameters()) and rows[-1]['loss'] < rows[0]['loss']


def test_the_logit_scale_stays_below_100(world, tmp_path):
    model = load(world['resnet'])
    with torch.no_grad(): model.logit_scale.fill_(5.)
    train(SceneGraphs(tiny_records()), model, Pixels(ImageStore(world['images']), model.preprocess), tmp_path, steps=1, batch_size=4)
    assert model.logit_scale.exp().item() <= 100.001


def test_divergence_is_named_and_leaves_no_model(world, tmp_path):
    with pytest.raises(DivergedError, match='step 1.*lower lr'): run(world, tmp_path, lr=1e20, warmup=0)
    assert not (tmp_path/'open_clip_config.json').exists()


def test_missing_images_are_named_before_the_first_step(world, tmp_path):
    with pytest.raises(CSClipError, match='1 of 13 images are missing, first train/12.png'): run(world, tmp_path, records=tiny_records(13))
    assert not (tmp_path/'log.jsonl').exists()


@pytest.mark.parametrize('workers', [0, 2])
def test_a_broken_picture_is_one_line_and_leaves_no_log(world, tmp_path, workers):
    (tmp_path/'images/train').mkdir(parents=True)
    for i in range(12): (tmp_path/f'images/train/{i}.png').write_bytes(png('red') if i != 7 else png('red')[:60])
    broken = {**world, 'images': str(tmp_path/'images')}
    with pytest.raises(CSClipError) as e: run(broken, tmp_path/'run', workers=workers)
    assert str(e.value).startswith(f'{tmp_path}/images/train/7.png: image "train/7.png" is truncated or no image (') and '\n' not in str(e.value)
    assert list((tmp_path/'run').iterdir()) == []


# ---- resuming
def wait_for_step(out, step, process):
    for _ in range(60_000):
        if (out/'log.jsonl').exists() and (out/'log.jsonl').read_text().count('\n') > step: return
        assert process.poll() is None, 'the run ended before it could be killed'
        time.sleep(.001)
    raise AssertionError('the run never came so far')


def test_a_killed_run_ends_as_if_it_had_not_been(world, tmp_path):
    def start(out): return subprocess.Popen([sys.executable, SCRIPT, world['resnet'], world['images'], out, '40'])
    whole, killed = start(tmp_path/'whole'), start(tmp_path/'killed')
    wait_for_step(tmp_path/'killed', 14, killed)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL and whole.wait() == 0
    assert (tmp_path/'killed'/'checkpoint.pt').exists() and not (tmp_path/'killed'/'open_clip_config.json').exists()
    assert start(tmp_path/'killed').wait() == 0
    for path in (tmp_path/'whole').iterdir(): assert path.read_bytes() == (tmp_path/'killed'/path.name).read_bytes(), path.name
    assert not (tmp_path/'killed'/'checkpoint.pt').exists()


class Killed(Exception): pass

def count_steps(monkeypatch, limit=10**9):
    "A list that grows with every step that is made; the one beyond `limit` is killed."
    made, step = [], training._step
    def counted(*args):
        if len(made) == limit: raise Killed
        made.append(1)
        return step(*args)
    monkeypatch.setattr(training, '_step', counted)
    return made

def other_pictures(world, folder):
    "The same names, one picture in another colour."
    shutil.copytree(world['images'], folder/'train')
    (folder/'train/train').mkdir()
    (folder/'train/train/3.png').write_bytes(png('white', (35, 32)))  # a loose file goes before an archive's member
    return {**world, 'images': folder/'train'}

CHANGES = {  # what a run depends on, changed
    'lr': {'lr': 2e-3}, 'seed': {'seed': 1}, 'method': {'method': 'clip_ft'}, 'margin': {'own': {'margin': .2}},
    'data': {'records': tiny_records(11)}, 'preprocessing': {'mean': (0., 0., 0.)}, 'pictures': {}, 'rules': {}}

def run_changed(world, out, monkeypatch, change):
    "The run in `out` again, but for one change; the number of steps that it made."
    if change == 'pictures': world = other_pictures(world, out)
    if change == 'rules': monkeypatch.setattr(training, 'RULES', training.RULES + 1)
    made = count_steps(monkeypatch)
    run(world, out, **CHANGES.get(change, {}))
    return len(made)


@pytest.mark.parametrize('change, made', [*((change, 12) for change in CHANGES), ('nothing', 7)])
def test_only_its_own_checkpoint_is_resumed(world, tmp_path, monkeypatch, change, made):
    with monkeypatch.context() as m:
        count_steps(m, 7)
        with pytest.raises(Killed): run(world, tmp_path)
    assert (tmp_path/'checkpoint.pt').exists()
    assert run_changed(world, tmp_path, monkeypatch, change) == made


@pytest.mark.parametrize('change, made', [*((change, 12) for change in CHANGES), ('nothing', 0)])
def test_a_run_that_ended_is_not_trained_again(world, tmp_path, monkeypatch, change, made):
    run(world, tmp_path)
    assert run_changed(world, tmp_path, monkeypatch, change) == made
    assert load(f'local-dir:{tmp_path}').digest == json.loads((tmp_path/'training.json').read_text())['model']


def test_a_run_that_ended_gives_log_and_weights(world, tmp_path, monkeypatch):
    rows, model = run(world, tmp_path)
    (tmp_path/'checkpoint.pt').write_bytes(b'killed before it was deleted')
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != 'checkpoint.pt'}
    made = count_steps(monkeypatch)
    again, same = run(world, tmp_path, checkpoint_every=3, workers=1)
    assert not made and again == rows and same.digest == model.digest and not same.training
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize('name', ['training.json', 'log.jsonl', 'open_clip_config.json', 'open_clip_model.safetensors', 'tokenizer_config.json'])
@pytest.mark.parametrize('damage', ['missing', 'cut', 'older'])
def test_a_damaged_run_is_trained_again(world, tmp_path, monkeypatch, name, damage):
    if damage == 'older':
        if name in ('open_clip_config.json', 'tokenizer_config.json'): pytest.skip('the same for every run')
        run(world, tmp_path/'older', steps=3)
    run(world, tmp_path/'run')
    whole, path = {p.name: p.read_bytes() for p in (tmp_path/'run').iterdir()}, tmp_path/'run'/name
    if damage == 'missing': path.unlink()
    elif damage == 'cut': path.write_bytes(whole[name][:-20])
    else: shutil.copy(tmp_path/'older'/name, path)
    made = count_steps(monkeypatch)
    run(world, tmp_path/'run')
    assert len(made) == 12 and {p.name: p.read_bytes() for p in (tmp_path/'run').iterdir()} == whole


def test_a_run_killed_while_it_saves_goes_on(world, tmp_path, monkeypatch):
    "training.json is the last file: without it the model that lies there is not taken for this run's."
    run(world, tmp_path/'whole')
    with monkeypatch.context() as m:
        def killed(path, obj): raise Killed
        m.setattr(training, 'write_json', killed)
        with pytest.raises(Killed): run(world, tmp_path/'killed')
    assert sorted(p.name for p in (tmp_path/'killed').iterdir() if 'clip' in p.name or p.suffix == '.pt') == [
        'checkpoint.pt', 'open_clip_config.json', 'open_clip_model.safetensors']
    made = count_steps(monkeypatch)
    run(world, tmp_path/'killed')
    assert len(made) == 2
    for path in (tmp_path/'whole').iterdir(): assert path.read_bytes() == (tmp_path/'killed'/path.name).read_bytes(), path.name


@pytest.mark.parametrize('log', [None, '', '{"step": 0}\n', '{"step": 0, "lo'])
def test_the_log_of_a_resumed_run_is_whole_whatever_became_of_the_file(world, tmp_path, monkeypatch, log):
    rows, _ = run(world, tmp_path/'whole')
    with monkeypatch.context() as m:
        count_steps(m, 7)
        with pytest.raises(Killed): run(world, tmp_path/'killed')
    (tmp_path/'killed/log.jsonl').unlink()
    if log is not None: (tmp_path/'killed/log.jsonl').write_text(log)
    assert run(world, tmp_path/'killed')[0] == rows
    assert (tmp_path/'killed/log.jsonl').read_bytes() == (tmp_path/'whole/log.jsonl').read_bytes()


def test_a_damaged_checkpoint_is_named(world, tmp_path):
    (tmp_path/'checkpoint.pt').write_bytes(b'half')
    with pytest.raises(CSClipError, match='checkpoint.pt.*delete it'): run(world, tmp_path)


def test_a_checkpoint_that_would_run_code_is_refused(world, tmp_path):
    class Harm:
        def __reduce__(self): return os.mkdir, (str(tmp_path/'harm'),)
    torch.save({'fingerprint': Harm()}, tmp_path/'checkpoint.pt')
    with pytest.raises(CSClipError, match='checkpoint.pt'): run(world, tmp_path)
    assert not (tmp_path/'harm').exists()


# ---- several processes
def test_two_processes_train_the_model_that_one_does(world, tmp_path):
    run(world, tmp_path/'one', 'negclip', base='vit', steps=8, warmup=4)
    command = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', SCRIPT, world['vit'], world['images'], tmp_path/'two', '8']
    subprocess.run([sys.executable, *command], check=True, env={**os.environ, 'OMP_NUM_THREADS': '1', 'ACCELERATE_USE_CPU': 'true'})
    one, two = (load_file(tmp_path/name/'open_clip_model.safetensors') for name in ('one', 'two'))
    base = load(world['vit']).clip.state_dict()
    assert max((one[k] - base[k]).abs().max() for k in base) > 1e-3
    for k in one: assert torch.allclose(one[k], two[k], atol=1e-4), k
    losses = [[json.loads(line)['loss'] for line in (tmp_path/name/'log.jsonl').read_text().splitlines()] for name in ('one', 'two')]
    assert all(abs(a - b) < 1e-4 for a, b in zip(*losses))


# ---- parameters and files
def test_parameters_are_merged_by_method():
    common = {'lr': 1e-5, 'steps': 10, 'margin': .2, 'neighbours': 4}
    methods = {'negclip': {'lr': 1e-6}, 'clip_ft': {'symmetric': True}}
    assert run_parameters('sg', common, methods) == ({'margin': .2}, {'lr': 1e-5, 'steps': 10})
    assert run_parameters('negclip', common, methods) == ({'neighbours': 4}, {'lr': 1e-6, 'steps': 10})
    assert run_parameters('clip_ft', common, methods) == ({'symmetric': True}, {'lr': 1e-5, 'steps': 10})


@pytest.mark.parametrize('method, common, methods, message', [
    ('sgd', {}, {}, 'clip_ft, negclip, sg'), ('clip', {}, {}, 'base model'), ('sg', {'lrr': 1}, {}, 'lrr; expected some of .*lr'),
    ('sg', {}, {'nega': {}}, 'clip_ft, negclip, sg'), ('sg', {}, {'negclip': {'margin': 1}}, 'margin'),
    ('sg', {}, {'sg': 3}, 'train.methods.sg is 3'), ('sg', {}, ['sg'], r'train.methods is \['),
    ('sg', {}, {'negclip': {'lr': 0}}, 'train.methods.negclip: lr is 0')])
def test_unknown_parameters(method, common, methods, message):
    with pytest.raises(CSClipError, match=message): run_parameters(method, common, methods)


def test_every_parameter_has_its_values():
    assert set(VALUES) == {*LOOP, 'seed', 'keep_images', *(k for cls in OBJECTIVES.values() for k in own_parameters(cls))}


NONSENSE = {  # for each parameter what it must not be; all refuse these
    **dict.fromkeys(('steps', 'batch_size', 'checkpoint_every', 'neighbours', 'n_units', 'max_conjunction', 'captions_per_text'), [0, 2.5]), 'lr': [0, -1e-5],
    **dict.fromkeys(('seed', 'warmup', 'workers'), [-5, 1.]), **dict.fromkeys(('weight_decay', 'margin', 'hinge_weight', 'lambda_u', 'lambda_npc', 'lambda_xac'), [-.1]),
    **dict.fromkeys(('symmetric', 'balance', 'keep_images', 'global_negatives'), [0, 1]),
    'p_rel': [-.1, 1.1], 'foils': ['both', None], 'tune': ['none', None],
    'precision': ['fp8', None], 'grad_clip': [0, -1], 'betas': [[.9], [.9, 1], [.9, -.1], [.9, 'x'], [.9, .98, .99]]}

EVERYWHERE = ['x', float('nan'), float('inf'), [1], {}]

@pytest.mark.parametrize('name, value', [(name, value) for name in VALUES for value in NONSENSE[name] + EVERYWHERE])
def test_values_that_make_no_sense(name, value):
    with pytest.raises(CSClipError, match=f'^train: {name} is .*; expected {re.escape(VALUES[name][0])}$'):
        if name in ('seed', 'keep_images'): train_run('sg', 'none', 'none', 'none', **{name: value})
        else: run_parameters('sg', {name: value})

@pytest.mark.parametrize('name', [name for name in VALUES if VALUES[name][0] != 'true or false'])
def test_true_is_no_number(name): assert not VALUES[name][1](True)


def test_c2lip_from_files(world, tmp_path):
    rows = [{'sentid': s, 'image': r.image, 'caption': c, 'concepts': list(n)} for r in tiny_records() for c, s, n in zip(r.captions, r.sentids, r.concepts)]
    (tmp_path/'concepts').mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path/'concepts/part-0.parquet')
    parameters = {'steps': 12, 'batch_size': 8, 'lr': 1e-3, 'warmup': 2, 'checkpoint_every': 5}
    train_run('c2lip', world['siglip'], world['images'], tmp_path/'out', concepts=tmp_path/'concepts', keep_images=True, **parameters)
    run(world, tmp_path/'direct', 'c2lip')
    assert weights(tmp_path/'out') == weights(tmp_path/'direct')
    with pytest.raises(CSClipError, match='no logit bias'):
        train_run('siglip_ft', world['resnet'], world['images'], tmp_path/'clip', concepts=tmp_path/'concepts', **parameters)
    with pytest.raises(CSClipError, match='attention pooling'):
        run(world, tmp_path/'tokens', 'c2lip', base_model=with_bias(load(world['resnet'])))


def with_bias(model):
    "A CLIP that has SigLIP's bias, but no tokens."
    model.clip.logit_bias = torch.nn.Parameter(torch.tensor(-1.))
    return model


def test_what_concepts_teach_and_what_they_leave(world, tmp_path):
    "Without its λ a loss is not computed; λ_xac = 0 is npc alone; the temperature and the bias learn too."
    for name, own, parts in ('npc', {'lambda_xac': 0.}, {'sigmoid', 'npc'}), ('none', {'lambda_npc': 0., 'lambda_xac': 0.}, {'sigmoid'}):
        rows, model = run(world, tmp_path/name, 'c2lip', own=own, steps=3)
        assert parts == set(rows[0]) & {'sigmoid', 'npc', 'xac'}
    base = load(world['siglip'])
    assert model.logit_bias != base.logit_bias and model.logit_scale != base.logit_scale
    plain, _ = run(world, tmp_path/'ft', 'siglip_ft', steps=3)
    assert [r['loss'] for r in plain] == pytest.approx([r['loss'] for r in rows], rel=1e-4)


@pytest.mark.parametrize('method, needed', [(method, needed) for method, made in OBJECTIVES.items() for needed in made.reads])
def test_a_method_names_the_folder_that_it_lacks(tmp_path, method, needed):
    others = {name: 'none' for name in OBJECTIVES[method].reads if name != needed}
    with pytest.raises(CSClipError, match=f'{method}: needs {needed}, the folder'): train_run(method, 'local-dir:none', 'none', tmp_path/'out', **others)


def test_captions_without_pictures_are_not_trained_on(world, tmp_path):
    records = Records(dataclasses.replace(r, image='') for r in tiny_records())
    with pytest.raises(CSClipError, match='captions that name no picture'): run(world, tmp_path/'out', 'clip_ft', records)
    assert not (tmp_path/'out').exists()


def test_a_siglip_keeps_a_scale_above_clips_bound(world, tmp_path):
    base = load(world['siglip'])
    with torch.no_grad(): base.logit_scale.fill_(4.77) # as ViT-B-16-SigLIP's
    rows, model = run(world, tmp_path, 'siglip_ft', base_model=base, steps=2, lr=1e-6)
    assert model.logit_scale.item() == pytest.approx(4.77, abs=1e-3)


def test_a_model_in_transformers_form_is_not_trained(world, tmp_path):
    base = load(tiny_transformers(tmp_path/'base'))
    with pytest.raises(CSClipError, match='transformers. form.*expected an open_clip model'): run(world, tmp_path/'out', 'clip_ft', base_model=base)
    assert not (tmp_path/'out').exists()


def test_variants_are_merged_into_their_method(world, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr('cs_clip.training.run_parameters', lambda *a: seen.append(a) or 1/0)
    for variant, expected in ((None, {'lr': 1., 'steps': 3}), ('text', {'lr': 1., 'steps': 5, 'tune': 'text'})):
        with pytest.raises(ZeroDivisionError): train_run('sg', 'none', 'none', 'none', methods={'sg': {'lr': 1., 'steps': 3}}, variant=variant,
                                                         variants={'text': {'tune': 'text', 'steps': 5}})
        assert seen.pop()[2] == {'sg': expected}
    with pytest.raises(CSClipError, match="variant 'txt': unknown; there are text"): train_run(*['none']*4, variant='txt', variants={'text': {}})


def test_a_run_from_files(world, tmp_path):
    rows = [{'sentid': s, 'image': r.image, 'caption': c, 'negatives': [f._asdict() for f in n], 'shuffled': t}
            for r in tiny_records() for c, s, n, t in zip(r.captions, r.sentids, r.negatives, r.shuffled)]
    (tmp_path/'generate').mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path/'generate/part-0.parquet')
    parameters = {'steps': 12, 'batch_size': 8, 'lr': 1., 'warmup': 2, 'checkpoint_every': 5, 'methods': {'sg': {'lr': 1e-3}}}
    train_run('sg', world['resnet'], world['images'], tmp_path/'out', supervision=tmp_path/'generate', keep_images=True, **parameters)
    run(world, tmp_path/'direct')
    assert weights(tmp_path/'out') == weights(tmp_path/'direct')
