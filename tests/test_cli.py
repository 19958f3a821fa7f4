"""The commands as a shell runs them, on a slice of the embedded world; what preflight calls missing; bad input in one line."""
import errno, json, os, shutil, subprocess, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq, pytest, yaml
from fastcore.script import anno_parser
from safetensors.torch import load_file, save_file
import cs_clip.cli
from cs_clip.cli import (checked_device, clip_is_here, compose, coverage_table, cs_clip_concepts, cs_clip_evaluate, cs_clip_extract, cs_clip_negatives, cs_clip_preflight, cs_clip_train,
                         cs_clip_units, examples, inputs, text_model_is_here, unit_examples)
from cs_clip.evaluation import headline
from cs_clip.files import UNFINISHED, CSClipError, write_json
from cs_clip.generation import KINDS
from cs_clip.parsing import parse_file
from cs_clip.units import CHANGES
from tiny_clip import tiny_transformers
from cs_clip.icon_world import write_world_half_truths

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = 'cs_clip_negatives', 'cs_clip_units', 'cs_clip_extract', 'cs_clip_concepts', 'cs_clip_train', 'cs_clip_evaluate', 'cs_clip_preflight'
WORLD, MLM, NLI = 'data/icon_world', 'data/models/mlm', 'data/models/nli'

@pytest.fixture(scope='module')
def scripts(tmp_path_factory):
    "A script for each console script's entry point: the commands read the command line in a script alone."
    folder = tmp_path_factory.mktemp('scripts')
    for name in COMMANDS:
        (folder/name).write_text(f'import sys\nfrom cs_clip.cli import {name}\nsys.exit({name}())\n')
    def run(cwd, name, *args):
        env = {**os.environ, 'PYTHONPATH': str(ROOT)}
        return subprocess.run([sys.executable, folder/name, *args], cwd=cwd, env=env, capture_output=True, text=True)
    run.folder = folder
    return run


def first(path, out, n):
    "The first `n` items of a JSON file."
    items = json.loads(path.read_text())
    write_json(out, items[:n] if isinstance(items, list) else dict(list(items.items())[:n]))

@pytest.fixture(scope='module')
def small(tmp_path_factory):
    "A project with the repository's profiles and models and the world's pictures, its lists cut short."
    if not (ROOT/'data/icon_world').exists(): pytest.fail(f'{ROOT}/data: the embedded world is not here; fetch it with `make data`', pytrace=False)
    folder, whole = tmp_path_factory.mktemp('small'), ROOT/'data/icon_world'
    for name in ('settings.ini', 'dvc.yaml'): (folder/name).touch()
    for name in ('conf', 'data/models'): shutil.copytree(ROOT/name, folder/name)
    world = folder/'data/icon_world'
    world.mkdir()
    for name in ('train.zip', 'test.zip', 'expected.json'): shutil.copy(whole/name, world)
    for path in (whole/'sugar_crepe').glob('*.json'): first(path, world/'sugar_crepe'/path.name, 3)
    for name in ('scpp', 'gqa', 'winoground', 'zero_shot'): shutil.copytree(whole/name, world/name)
    for name in ('visual_genome_relation.json', 'visual_genome_attribution.json'): first(whole/name, world/name, 3)
    write_world_half_truths(world, pictures=60, n=2)
    images = json.loads((whole/'dataset_coco.json').read_text())['images']
    few = [i for split in ('train', 'test') for i in [i for i in images if i['split'] == split][:12]]
    write_json(world/'dataset_coco.json', {'images': few, 'dataset': 'coco'})
    return folder

@pytest.fixture
def project(small, tmp_path, monkeypatch):
    "The small project to break, as the current folder."
    shutil.copytree(small, tmp_path/'project', copy_function=os.link)
    monkeypatch.chdir(tmp_path/'project')
    return tmp_path/'project'

@pytest.fixture(scope='module')
def made(small, scripts):
    "The small project after the commands ran in it, and what each of them printed."
    def ended(*args):
        done = scripts(small, *args)
        assert done.returncode == 0, done.stderr
        return done.stdout
    train = ('cs_clip_train', 'sg', WORLD, 'made/model', '--supervision', 'made/supervision', '--model', 'local-dir:data/models/clip',
             '--set', 'steps=2', 'batch_size=4')
    evaluate = 'cs_clip_evaluate', 'local-dir:made/model', '--benchmark', 'sugar_crepe', '--out', 'made/scores', '--world', 'IconWorld', '--run', 'sg-mine-0', '--paths'
    return small, {
        'negatives': ended('cs_clip_negatives', f'{WORLD}/dataset_coco.json', '--out', 'made/supervision', '--mlm', MLM, '--nli', NLI),
        'units': ended('cs_clip_units', 'made/supervision/graphs', 'made/units', '--mlm', MLM, '--nli', NLI, '--min_uses', '2'),
        'concepts': ended('cs_clip_concepts', 'made/supervision/graphs', 'made/concepts'),
        'train': ended(*train), 'train again': ended(*train),
        'evaluate': ended(*evaluate, f'sugar_crepe={WORLD}/sugar_crepe', f'images={WORLD}/test.zip', '--cache', 'made/cache'),
        'half-truths': ended('cs_clip_evaluate', 'local-dir:data/models/clip', '--benchmark', 'half_truth', '--out', 'made/scores', '--world', 'IconWorld', '--paths',
                             f'half_truth={WORLD}/half_truth.jsonl', f'images_root={WORLD}')}

# ---- end to end
def test_negatives(made):
    folder, said = made
    rows = pq.read_table(folder/'made/supervision/part-00000.parquet').to_pylist()
    images = json.loads((folder/WORLD/'dataset_coco.json').read_text())['images']
    assert [r['caption'] for r in rows] == [s['raw'] for i in images if i['split'] == 'train' for s in i['sentences']]
    assert any(r['negatives'] for r in rows) and (folder/'made/supervision/graphs/part-00000.parquet').exists()
    first, table, *shown, last = said['negatives'].split('\n\n')
    assert (first, last) == (f'{WORLD}/dataset_coco.json: {len(rows)} captions', 'made/supervision: written\n')
    counts = json.loads((folder/'made/supervision/coverage.json').read_text())
    header, *lines = table.splitlines()
    assert [line.split()[:2] for line in lines] == [[kind, str(counts[kind]['made'])] for kind in KINDS] and len({len(line) for line in lines}) == 1
    assert all(reason in header for kind in KINDS for reason in counts[kind])
    plain = [[line.replace('[', '').replace(']', '').split(None, 1)[1] for line in example.splitlines()] for example in shown]
    made = {(n['kind'], r['caption'], n['text']) for r in rows for n in r['negatives']}
    assert {(kind, *pair) for kind, pair in zip([k for k in KINDS if counts[k]['made']], plain)} <= made and shown


def test_units(made):
    folder, said = made
    rows = pq.read_table(folder/'made/units/part-00000.parquet').to_pylist()
    assert [r['caption'] for r in rows] == [r['caption'] for r in pq.read_table(folder/'made/supervision/part-00000.parquet').to_pylist()]
    counts = json.loads((folder/'made/units/coverage.json').read_text())
    first, table, shown, last = said['units'].split('\n\n')
    assert (first, last) == (f'made/supervision/graphs: {len(rows)} captions', 'made/units: written\n')
    names = ['entities', 'relations', *sum(CHANGES.values(), ())]
    header, made_, *reasons = table.splitlines()
    assert header.split() == names and made_.split() == ['made', *(str(counts[n]['made']) for n in names)]
    assert {line[:len(line) - len(line.lstrip()) + 40].split('  ')[0].strip() for line in reasons} == {r for n in names for r in counts[n]} - {'made'}
    found = unit_examples(folder/'made/units')
    assert [line.split()[0] for line in shown.splitlines()] == list(found) and all(unit != foil and f'{unit}  ->  {foil}' in shown for unit, foil in found.values())


def test_units_feed_training(made, monkeypatch, capsys):
    monkeypatch.chdir(made[0])
    given = dict(model='local-dir:data/models/clip', set=['steps=1', 'batch_size=4'], units='made/units')
    assert cs_clip_train('units', WORLD, 'made/by_units', supervision='made/supervision', **given) == 0 and 'made/by_units: 1 steps' in capsys.readouterr().out


def test_concepts_feed_training(made, monkeypatch, capsys):
    folder, said = made
    rows = pq.read_table(folder/'made/concepts/part-00000.parquet').to_pylist()
    n = sum(len(r['concepts']) for r in rows)
    assert said['concepts'].startswith(f'made/supervision/graphs: {len(rows)} captions, {n} concepts, ') and said['concepts'].endswith('made/concepts: written\n')
    monkeypatch.chdir(folder)
    given = dict(model='local-dir:data/models/siglip', set=['steps=1', 'batch_size=4'], concepts='made/concepts')
    assert cs_clip_train('c2lip', WORLD, 'made/by_concepts', **given) == 0 and 'made/by_concepts: 1 steps' in capsys.readouterr().out
    assert cs_clip_concepts('made/supervision/graphs', 'made/concepts', 'noun') == 0 and 'were of other captions or of another rule' in capsys.readouterr().err
    assert cs_clip_concepts('made/supervision/graphs', 'made/units') == 1 and 'of another stage' in capsys.readouterr().err


@pytest.mark.parametrize('name', COMMANDS)
def test_every_argument_is_explained(name):
    parser = anno_parser(getattr(cs_clip.cli, name))
    assert parser.description and all(a.help for a in parser._actions)


def test_train(made):
    folder, said = made
    assert sorted(p.name for p in (folder/'made/model').iterdir()) == [
        'log.jsonl', 'open_clip_config.json', 'open_clip_model.safetensors', 'tokenizer.json', 'tokenizer_config.json', 'training.json']
    parameters = json.loads((folder/'made/model/training.json').read_text())['parameters']
    assert (parameters['method'], parameters['steps'], parameters['batch_size'], parameters['seed']) == ('sg', 2, 4, 0)
    assert said['train'].startswith('made/model: 2 steps, loss ') and said['train again'] == said['train']


def test_another_run_is_not_replaced_in_silence(made, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(made[0])
    given = dict(model='local-dir:data/models/clip')
    def run(*settings, **more):
        assert cs_clip_train('sg', WORLD, str(tmp_path/'model'), supervision='made/supervision', set=['batch_size=4', *settings], **{**given, **more}) == 0
        return [line for line in capsys.readouterr().err.splitlines() if 'holds another run' in line]
    assert run('steps=1') == [] and run('steps=1') == []
    assert run('steps=1', 'lr=2e-4', seed=3) == [f'{tmp_path/"model"}: holds another run, which is replaced; lr 1e-05, now 0.0002; seed 0, now 3']
    said, = run('steps=1', 'lr=2e-4', seed=3, model='local-dir:made/model')
    assert 'base_model' in said and 'lr' not in said
    assert cs_clip_train('sg', WORLD, str(tmp_path/'model'), supervision='made/supervision', set=['lrr=1'], **given) == 1
    assert 'holds another run' not in capsys.readouterr().err


def test_shards_of_another_run_are_not_replaced_in_silence(project, capsys):
    captions = ['a red car next to a dog', 'a small cat on a blue table', 'a man rides a horse']
    def run(*lines, **more):
        Path('x.txt').write_text('\n'.join(lines))
        assert cs_clip_negatives('x.txt', 'out', mlm=MLM, nli=NLI, kinds=['replace_att'], shard_size=1, **more) == 0
        return [line for line in capsys.readouterr().err.splitlines() if 'replaced' in line]
    assert run(*captions) == [] and run(*captions) == []
    assert run(*captions, seed=1) == ['out: 3 of 3 shards of an earlier run were of other settings or models, and are replaced']
    assert run(captions[0], captions[2], seed=1) == ['out: 2 of 3 shards of an earlier run were of other captions, and are replaced']
    for folder in 'out', 'out/graphs':
        before = Path(f'{folder}/part-00000.parquet').read_bytes()
        assert cs_clip_units('out/graphs', folder, mlm=MLM, nli=NLI) == 1 and 'of another stage; choose another folder' in capsys.readouterr().err
        assert Path(f'{folder}/part-00000.parquet').read_bytes() == before and not Path(f'{folder}/{UNFINISHED}').exists()
    for seed in 0, 0, 1: assert cs_clip_units('out/graphs', 'units', mlm=MLM, nli=NLI, seed=seed) == 0
    assert capsys.readouterr().err.count('units: 2 of 2 shards of an earlier run were of other captions, settings or models') == 1


def test_evaluate(made):
    folder, said = made
    result = json.loads((folder/'made/scores/sg-mine-0/sugar_crepe.json').read_text())
    assert (result['run'], result['method'], result['seed'], result['world']) == ('sg-mine-0', 'sg', 0, 'IconWorld')
    printed = f'{headline(result)}\nmade/scores/sg-mine-0/sugar_crepe.json: written'  # but for the order of the subsets, which the file sorts
    assert sorted(said['evaluate'].splitlines()) == sorted(printed.splitlines()) and len(result['subsets']) == 7
    assert all('blind' in s and s['n'] == 3 for s in result['subsets'].values()) and result['provenance']['blind']
    assert 'INCOMPLETE (add_att: 3 of 400' in said['evaluate'] and {p.parent.parent.name for p in (folder/'made/cache').rglob('*.npz')} == {'embeddings', 'blind'}


def test_evaluate_without_a_blind_reader(made, monkeypatch, capsys):
    monkeypatch.chdir(made[0])
    given = dict(benchmark='winoground', out='made/alone', world='IconWorld', run='mine',
                 paths=[f'winoground={WORLD}/winoground/examples.jsonl', f'winoground_images={WORLD}/winoground/images.zip'])
    for matching in (False, True):
        given['run'] = 'matching' if matching else 'embedding' # one name holds no two heads
        assert cs_clip_evaluate(model='local-dir:made/model', mlm='none', matching=matching, **given) == 0
        assert 'blind' not in (said := capsys.readouterr().out) and 'group' in said
        assert json.loads(Path(f'made/alone/{given["run"]}/winoground.json').read_text())['provenance']['head'] == given['run']
    assert cs_clip_evaluate(model='local-dir:made/model', mlm='data/models/nowhere', **given) == 1
    assert 'data/models/nowhere: no folder' in capsys.readouterr().err


def test_evaluate_half_truths(made):
    folder, said = made
    result = json.loads((folder/'made/scores/clip/half_truth.json').read_text())
    assert result['subsets']['relation']['n'] == 4 and said['half-truths'].startswith('half_truth: ') and all(k in said['half-truths'] for k in ('object', 'swap', 'entity'))


def test_preflight(small, scripts):
    done = scripts(small, 'cs_clip_preflight', 'paper_sg')
    *rows, last = done.stdout.splitlines()
    wanting = [row.split()[0] for row in rows if row.endswith('MISSING')]
    assert all(row.endswith(('ok', 'MISSING')) for row in rows) and {'parse.karpathy', 'train.images', 'evaluate.vg_images'} <= set(wanting)
    assert (last, done.returncode) == (f'paper_sg: {len(wanting)} of {len(rows)} missing', 1)


def test_preflight_of_what_is_there(project, capsys, monkeypatch):
    monkeypatch.setattr('cs_clip.cli.machine', lambda needs: [('disk', 'enough', True)])
    assert cs_clip_preflight(profile='icon_world') == 0 and capsys.readouterr().out.splitlines()[-1] == 'icon_world: ready'


def test_bad_input_ends_the_process_with_1(tmp_path, scripts):
    done = scripts(tmp_path, 'cs_clip_train', 'sg', 'images', 'out', '--supervision', 'supervision', '--set', 'seed=1')
    assert (done.returncode, done.stdout) == (1, '') and done.stderr.count('\n') == 1 and done.stderr.startswith('error: ')
    done = scripts(tmp_path, 'cs_clip_evaluate', 'local-dir:model', '--benchmark', 'sugar_crepe')
    assert done.returncode == 2 and 'the following arguments are required: --world' in done.stderr


def test_k_and_tolerance_reach_the_negatives(project, capsys):
    Path('captions.txt').write_text('a red car next to a dog\n\na small cat on a blue table\n')
    def made(out, **more):
        assert cs_clip_negatives('captions.txt', out, mlm=MLM, nli=NLI, kinds=['replace_obj'], **more) == 0
        return [n for r in pq.read_table(f'{out}/part-00000.parquet').to_pylist() for n in r['negatives']]
    assert [n['mlm_rank'] for n in made('k', k=1)] == [0, 0]
    drawn = {tuple(n['replacement'] for n in made(f'{seed}', tolerance=1., seed=seed)) for seed in range(6)}
    assert len(drawn) > 2, 'all candidates are equals, so that the seed chooses'
    assert 'captions.txt: 2 captions; empty caption, left out: 1' in capsys.readouterr().out


def test_what_a_list_of_captions_lacks_is_said(project, capsys):
    sentences = [{'sentid': 1, 'raw': 'a red car'}, {'sentid': 2, 'raw': ' '}]
    images = [{'filename': f'{i}.png', 'split': 'train', 'sentences': s} for i, s in enumerate((sentences, []))]
    write_json(Path('few.json'), {'images': images})
    assert cs_clip_negatives('few.json', 'out', mlm=MLM, nli=NLI, kinds=['swap_obj']) == 0
    said = capsys.readouterr().out
    assert 'empty caption, left out: 1' in said and 'image without a caption, left out: 1' in said


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
def test_captions_of_any_format(project, capsys, suffix):
    rows = [{'caption': c, 'id': i, 'image': f'train/{i}.png'} for i, c in enumerate(('a red car next to a dog', 'a small cat'), 70)]
    if suffix == 'jsonl': Path('few.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    else: pq.write_table(pa.Table.from_pylist(rows), 'few.parquet')
    assert cs_clip_negatives(f'few.{suffix}', out='out', mlm=MLM, nli=NLI, kinds=['add_att', 'add_att']) == 0
    made = pq.read_table('out/part-00000.parquet').to_pylist()
    assert [(r['sentid'], r['image'], r['caption'], len(r['negatives'])) for r in made] == [(i['id'], i['image'], i['caption'], 1) for i in rows]


def test_the_numbers_stand_below_each_other():
    table = coverage_table({'swap_obj': {'made': 1234, 'no such element': 5}, 'add_att': {'made': 12, 'no candidate': 7}}, ('swap_obj', 'add_att'))
    assert table.splitlines() == ['           made  no such element  no candidate', 'swap_obj  1,234                5             0',
                                  'add_att      12                0             7']


def test_examples_mark_what_differs(made):
    folder, _ = made
    found = examples(folder/'made/supervision', KINDS)
    assert list(found) == [kind for kind in KINDS if kind in found]
    for kind, (caption, negative) in found.items():
        assert negative.count('[') == negative.count(']') == 1 and ('[' in caption or kind.startswith('add'))


def test_a_device_is_one_of_this_machine():
    assert checked_device('cpu') == 'cpu'
    for name in ('gpu', 'cuda:99', 'mps:7', ''):
        with pytest.raises(CSClipError, match=f'^device "{name}": this machine has none; .*: cpu, cuda, cuda:0, mps$'): checked_device(name)


# ---- what is missing
def missing(): return [what for what, _, here in inputs(yaml.safe_load(compose('icon_world'))) if not here]


def test_nothing_is_missing(project): assert missing() == []

@pytest.mark.parametrize('name, rows', [
    ('icon_world/train.zip', ['train.images']), ('icon_world/sugar_crepe/swap_obj.json', ['evaluate.sugar_crepe']),
    ('icon_world/test.zip', ['evaluate.images', 'evaluate.images_root']), ('icon_world/visual_genome_relation.json', ['evaluate.vg_relation']),
    ('icon_world/visual_genome_attribution.json', ['evaluate.vg_attribution']), ('icon_world/dataset_coco.json', ['parse.karpathy']),
    ('icon_world/scpp/data/swap_obj.json', ['evaluate.sugar_crepe_pp']), ('icon_world/winoground/examples.jsonl', ['evaluate.winoground']),
    ('icon_world/gqa/val_sceneGraphs.json', ['evaluate.gqa_questions', 'evaluate.gqa_scene_graphs']),
    ('icon_world/winoground/images.zip', ['evaluate.winoground_images']), ('icon_world/zero_shot/test/cat', ['evaluate.zero_shot']),
    ('icon_world/half_truth.jsonl', ['evaluate.half_truth']),
    *((f'models/mlm/{name}', ['generate.mlm']) for name in ('config.json', 'model.safetensors', 'tokenizer.json')),
    ('models/nli/model.safetensors', ['generate.nli']),
    *((f'models/clip/{name}', ['train.model'])
      for name in ('open_clip_config.json', 'open_clip_model.safetensors', 'tokenizer.json', 'tokenizer_config.json'))])
def test_every_file_that_a_stage_opens_is_asked_for(project, name, rows):
    if (path := project/'data'/name).is_dir(): [p.unlink() for p in path.iterdir()]
    else: path.unlink()
    assert missing() == rows

@pytest.mark.parametrize('name, rows', [('train.zip', ['train.images']), ('sugar_crepe/add_att.json', ['evaluate.sugar_crepe'])])
def test_what_cannot_be_read_is_not_here(project, name, rows):
    path = project/'data/icon_world'/name
    path.unlink()  # it is a link to the small project's
    path.write_bytes(b'half')
    assert missing() == rows


def test_weights_of_another_format_are_not_what_generation_opens(project):
    (project/'data/models/mlm/model.safetensors').rename(project/'data/models/mlm/pytorch_model.bin')
    assert not text_model_is_here('data/models/mlm') and text_model_is_here('data/models/nli')


def test_a_file_of_weights_and_a_transformers_folder_are_models_too(tmp_path):
    (tmp_path/'negclip.pt').touch()
    for name, here in (('ViT-B-32-quickgelu', True), ('ViT-B-32-gelu', True), ('ViT-B-32', True), ('no-such-model', False), ('ViT-B-16-SigLIP', False)):
        assert clip_is_here(f'{name}/{tmp_path}/negclip.pt') == here, name  # SigLIP's tokenizer is the hub's
        assert not clip_is_here(f'{name}/{tmp_path}/gone.pt')
    name = tiny_transformers(tmp_path, 'siglip')
    assert clip_is_here(name)
    (tmp_path/'siglip/preprocessor_config.json').unlink()
    assert not clip_is_here(name)


def test_models_of_the_hub_are_looked_for_in_the_cache(tmp_path, monkeypatch):
    "Only the files that are opened count, a text model's tokenizer and weights too."
    found = set()
    monkeypatch.setattr('cs_clip.cli.try_to_load_from_cache', lambda repository, name: str(tmp_path/name) if name in found else None)
    for name in ('config.json', 'pytorch_model.bin', 'vocab.txt'):
        found.add(name)
        assert not text_model_is_here('org/bert')
    found.add('model.safetensors')
    assert text_model_is_here('org/bert') and not clip_is_here('ViT-B-32/openai') and not clip_is_here('hf-hub:org/clip')
    found |= {'open_clip_model.safetensors', 'open_clip_config.json'}
    write_json(tmp_path/'open_clip_config.json', {'model_cfg': {'text_cfg': {'hf_tokenizer_name': 'org/bert'}}})
    assert clip_is_here('ViT-B-32/openai') and not clip_is_here('hf-hub:org/clip')
    found.add('tokenizer_config.json')
    assert clip_is_here('hf-hub:org/clip') and not clip_is_here('ViT-B-32/no_such_tag')


# ---- bad input
BAD = [
    (cs_clip_negatives, {'captions': 'nowhere.txt'}, 'nowhere.txt: cannot be read'),
    (cs_clip_negatives, {'captions': 'x.csv'}, 'x.csv: unknown suffix'),
    (cs_clip_negatives, {'mlm': WORLD}, 'no AutoTokenizer can be loaded'),
    (cs_clip_negatives, {'captions': 'cut.jsonl'}, 'cut.jsonl: broken JSON at line 2'),
    (cs_clip_negatives, {'kinds': ['replace_noun']}, 'unknown kind replace_noun; expected some of replace_obj'),
    (cs_clip_negatives, {'tolerance': -1.}, 'tolerance is -1'), (cs_clip_negatives, {'device': 'gpu'}, 'device "gpu": this machine has none'),
    (cs_clip_negatives, {'mlm': 'data/models/clip'}, 'data/models/clip: its tokenizer has no mask token'),
    (cs_clip_negatives, {'mlm': 'no_weights'}, 'no_weights: no AutoModelForMaskedLM can be loaded (Error no file named model.safetensors'),
    (cs_clip_negatives, {'nli': 'two_labels'}, 'two_labels: its labels are entailment, contradiction; expected entailment, neutral'),
    (cs_clip_negatives, {'mlm': 'data/models/mlmm'}, 'the embedded model is --mlm data/models/mlm, which `make data` fetches'),
    (cs_clip_negatives, {'mlm': NLI}, f'{NLI}: is a BertForSequenceClassification; --mlm takes a masked language model'),
    (cs_clip_negatives, {'nli': MLM}, f'{MLM}: is a BertForMaskedLM; --nli takes an inference model, a …ForSequenceClassification; are --mlm and --nli exch'),
    (cs_clip_negatives, {'captions': None, 'explain': ' '}, '--explain: the caption is empty; expected words'),
    (cs_clip_units, {}, 'nowhere: no part-*.parquet'), (cs_clip_units, {'limit': 0}, 'limit is 0'), (cs_clip_units, {'min_uses': -1}, 'min_uses -1'),
    (cs_clip_units, {'graphs': 'graphs', 'nli': MLM}, 'are --mlm and --nli exchanged?'), (cs_clip_units, {'graphs': 'graphs', 'k': 0}, 'k is 0'),
    (cs_clip_extract, {}, 'nowhere: no part-*.parquet'), (cs_clip_extract, {'graphs': 'graphs', 'extra': '[]'}, '--extra []: expected a JSON object'),
    (cs_clip_extract, {'graphs': 'graphs', 'extra': '{x'}, '--extra {x: expected'), (cs_clip_extract, {'graphs': 'graphs', 'tries': 0}, '--tries 0: expected 1 or more'),
    (cs_clip_evaluate, {'mlm': NLI}, '--mlm takes a masked language model'),
    (cs_clip_train, {'units': 'u'}, '--units u: sg reads no units; leave it away, or train units'),
    (cs_clip_train, {'concepts': 'c', 'method': 'units', 'units': 'u'}, '--concepts c: units reads no concepts; leave it away, or train siglip_ft or c2lip'),
    (cs_clip_train, {'method': 'c2lip'}, '--supervision nowhere: c2lip reads no supervision; leave it away, or train clip_ft or negclip or sg or units'),
    (cs_clip_train, {'supervision': None}, 'sg: needs supervision, the folder that cs_clip_negatives or the generate stage wrote'),
    (cs_clip_train, {'supervision': 'nowhere'}, 'nowhere: no part-*.parquet'), (cs_clip_train, {'method': 'clip'}, 'base model'),
    (cs_clip_train, {'set': ['seed=1']}, 'seed=1: seed has an argument of its own'), (cs_clip_train, {'set': ['lr=1', 'lr=2']}, 'lr: given twice'),
    (cs_clip_train, {'set': ['model=x']}, 'model has an argument'), (cs_clip_train, {'set': ['steps']}, '"steps": expected key=value'),
    (cs_clip_train, {'set': ['warmup=-5']}, 'warmup is -5'), (cs_clip_train, {'set': ['lrr=1']}, 'unknown parameter lrr'),
    (cs_clip_train, {'set': ['methods=3']}, 'unknown parameter methods'), (cs_clip_train, {'seed': -1}, 'seed is -1'),
    (cs_clip_train, {'set': ['margin=.2'], 'method': 'clip_ft'}, 'clip_ft: unknown parameter margin; expected some of balance, batch_size'),
    (cs_clip_train, {'set': ['keep_images=3']}, 'keep_images is 3'),
    (cs_clip_train, {'set': ['keep_images=true'], 'supervision': 'torn'}, 'torn/part-00000.parquet: no readable Parquet file'),
    (cs_clip_evaluate, {'device': 'gpu'}, 'device "gpu": this machine has none'),
    (cs_clip_evaluate, {'benchmark': 'sugarcrepe'}, 'unknown benchmark'), (cs_clip_evaluate, {}, 'needs sugar_crepe, images'),
    (cs_clip_evaluate, {'paths': ['sugarcrepe=x']}, '--paths: unknown sugarcrepe; expected sugar_crepe, images'),
    (cs_clip_evaluate, {'paths': ['name=x']}, 'name has an argument'), (cs_clip_evaluate, {'paths': ['images=1', 'images=2']}, 'images: given twice'),
    (cs_clip_evaluate, {'paths': ['sugar_crepe=2017', 'images=2017']}, '2017/replace_obj.json: not found'),
    (cs_clip_preflight, {'profile': 'nobody'}, 'there are icon_world, paper_sg')]
GOOD = {cs_clip_units: {'graphs': 'nowhere', 'out': 'out', 'mlm': MLM, 'nli': NLI}, cs_clip_extract: {'graphs': 'nowhere', 'out': 'out'},
        cs_clip_negatives: {'captions': 'x.txt', 'out': 'out', 'mlm': MLM, 'nli': NLI},
        cs_clip_train: {'method': 'sg', 'supervision': 'nowhere', 'images': 'nowhere', 'out': 'out'},
        cs_clip_evaluate: {'model': 'local-dir:nowhere', 'benchmark': 'sugar_crepe', 'out': 'out', 'world': 'IconWorld'}}

@pytest.fixture
def broken(project):
    "The project with models that lack something, a torn shard and captions cut short."
    Path('x.txt').write_text('a red car next to a dog\n')
    parse_file([(1, '', 'a red car next to a dog')], 'graphs')
    Path('cut.jsonl').write_text('{"caption": "a dog"}\n{"caption": "a c')
    (project/'torn').mkdir()
    (project/'torn/part-00000.parquet').write_bytes(b'PAR1')
    shutil.copytree(MLM, 'no_weights', ignore=lambda *_: ['model.safetensors'])
    shutil.copytree(NLI, 'two_labels')
    weights, config = load_file('two_labels/model.safetensors'), json.loads(Path('two_labels/config.json').read_text())
    two = {k: v[:2].contiguous() if k.startswith('classifier') else v for k, v in weights.items()}
    save_file(two, 'two_labels/model.safetensors', {'format': 'pt'})
    labels = ['entailment', 'contradiction']
    write_json('two_labels/config.json', {**config, 'id2label': dict(enumerate(labels)), 'label2id': {v: i for i, v in enumerate(labels)}})
    return project

@pytest.mark.parametrize('run, given, message', BAD)
def test_bad_input_is_one_line(broken, capsys, run, given, message):
    assert run(**{**GOOD.get(run, {}), **given}) == 1
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1] and err[-1].startswith('error: ') and sum(line.startswith('error') for line in err) == 1
    assert not (broken/'out').exists()


@pytest.mark.parametrize('offline', [False, True])
def test_the_papers_models_are_named_where_they_cannot_be_had(broken, capsys, monkeypatch, offline):
    "Without a network, and with the hub switched off: at once, and with what to take instead."
    def refuse(*_, **__): raise ConnectionError('no way there')
    if offline: monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    else: monkeypatch.setattr('cs_clip.cli.get_hf_file_metadata', refuse)
    monkeypatch.setattr('cs_clip.cli.try_to_load_from_cache', lambda *_: None)
    assert cs_clip_negatives('x.txt', out='out', nli=NLI) == 1
    error, = capsys.readouterr().err.splitlines()
    assert error.startswith('error: bert-base-uncased: no folder, not in the cache, and the model hub does not give it (')
    assert error.endswith('take a folder: the embedded model is --mlm data/models/mlm, which `make data` fetches')


def test_captions_among_the_shards_are_not_overwritten(broken, capsys):
    pq.write_table(pa.table({'caption': ['a red car']}), 'part-00007.parquet')
    assert cs_clip_negatives('part-00007.parquet', out='.', mlm=MLM, nli=NLI) == 1
    assert 'choose another folder' in capsys.readouterr().err and pq.read_table('part-00007.parquet').num_rows == 1


@pytest.mark.parametrize('code', [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize('written', [1, 4]) # whole files before the disk refuses: it does in the graphs, in the negatives
def test_a_disk_that_refuses_leaves_whole_shards_and_the_run_goes_on(project, capsys, monkeypatch, code, written):
    Path('x.txt').write_text(''.join(f'a {c} car next to a dog\n' for c in ('red', 'blue', 'green', 'white', 'small', 'large')))
    def run(out): return cs_clip_negatives('x.txt', out=out, mlm=MLM, nli=NLI, shard_size=2)
    def shards(out): return {str(p.relative_to(out)): p.read_bytes() for p in Path(out).rglob('*') if p.is_file() and p.name != UNFINISHED}
    assert run('undisturbed') == 0
    left, write = [None]*written, pq.write_table
    def until_full(table, path):
        if left: left.pop(); return write(table, path)
        Path(path).write_bytes(b'PAR1 half')
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr('cs_clip.files.pq.write_table', until_full)
    assert run('out') == 1
    error = capsys.readouterr().err.splitlines()[-1]
    refused = [f'{folder}part-0000{i}.parquet' for folder in ('graphs/', '') for i in range(3)][written]
    assert error == (f'error: out/{refused}: cannot be written ({os.strerror(code)}); nothing was changed: '
                     'make room or choose another folder, and start again')
    finished = shards('out')
    assert len(finished) == written and finished.items() <= shards('undisturbed').items()
    monkeypatch.setattr('cs_clip.files.pq.write_table', write)
    before = {name: (Path('out')/name).stat().st_mtime_ns for name in finished}
    assert run('out') == 0 and shards('out') == shards('undisturbed')
    assert before == {name: (Path('out')/name).stat().st_mtime_ns for name in finished}

def rows_of(folder): return [row for path in sorted(folder.glob('part-*.parquet')) for row in pq.read_table(path).to_pylist()]

def test_neither_shards_nor_processes_change_the_negatives(bert_mlm, nli, tmp_path, scripts):
    captions = ['An orange car to the left of a blue umbrella.', 'a man is riding a horse', 'a dog and a cat', 'two red dogs', 'a big cat on a table']
    (tmp_path/'captions.txt').write_text('\n'.join(captions*3))
    models = ['--mlm', str(bert_mlm), '--nli', str(nli)]
    for name, size in ('one', 4), ('large', 100):
        assert scripts(tmp_path, 'cs_clip_negatives', 'captions.txt', '--out', name, '--shard_size', str(size), *models).returncode == 0
    launch = [sys.executable, '-m', 'accelerate.commands.launch', '--cpu', '--num_processes', '2', '--num_machines', '1', '--mixed_precision', 'no',
              '--dynamo_backend', 'no', '--main_process_port', '0', scripts.folder/'cs_clip_negatives']
    done = subprocess.run([*launch, 'captions.txt', '--out', 'two', '--shard_size', '4', *models], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}, timeout=300)
    assert done.returncode == 0 and done.stdout.count('two: written') == 1, done.stderr
    content = lambda folder: {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}
    assert content(tmp_path/'one') == content(tmp_path/'two') and len(content(tmp_path/'one')) == 9
    assert rows_of(tmp_path/'one') == rows_of(tmp_path/'large')

def test_one_caption_is_explained_and_nothing_written(bert_mlm, nli, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cs_clip_negatives(explain='A red dog on a table', mlm=str(bert_mlm), nli=str(nli)) == 0
    said = capsys.readouterr().out
    assert 'relations   dog [on] table' in said and 'replace_att  A ___ dog on a table' in said and 'dropped, no whole word' in said
    assert said.count(' kept') >= 5 and list(tmp_path.iterdir()) == []
    assert cs_clip_negatives() == 1 and 'expected a file of captions' in capsys.readouterr().err
    assert cs_clip_negatives(explain='a dog', variant='random') == 1 and '--explain takes mlm_nli or mlm' in capsys.readouterr().err
