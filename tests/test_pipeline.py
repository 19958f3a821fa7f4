"""All stages, through their own notebooks, on a slice of the embedded world: what they write, and that a second run writes the same bytes."""
import json
from pathlib import Path

import pytest
import yaml

from cs_clip.files import write_json
from cs_clip.icon_world import write_world_half_truths
from cs_clip.stage import StageFailed, run_stage

ROOT = Path(__file__).resolve().parents[1]
WORLD = ROOT/'data/icon_world'
METHODS = ['clip_ft', 'negclip', 'sg', 'units']
RUNS = ['clip', *(f'{method}-0' for method in METHODS)]
BENCHMARKS = ['sugar_crepe', 'vg_relation', 'vg_attribution', 'controlled', 'retrieval', 'sugar_crepe_pp', 'gqa', 'winoground', 'zero_shot',
              'half_truth']
VARIANTS = ['text_only', 'no_foils']
SIGLIP, SINGLE = ['siglip_ft-0', 'c2lip-0', 'c2lip-npc-0', 'sg-0'], 'c2lip-npc_single-0' # runs on the other base, and a variant of them


def write_slice(out):
    "A small Karpathy file and small benchmark files over the world's own pictures."
    images = json.loads((WORLD/'dataset_coco.json').read_text())['images']
    few = [i for split, n in (('train', 48), ('test', 24)) for i in [x for x in images if x['split'] == split][:n]]
    write_json(out/'dataset_coco.json', {'images': few, 'dataset': 'coco'})
    for path in sorted((WORLD/'sugar_crepe').glob('*.json')):
        write_json(out/'sugar_crepe'/path.name, dict(list(json.loads(path.read_text()).items())[:6]))
    for path in sorted((WORLD/'scpp/data').glob('*.json')): write_json(out/'scpp'/path.name, json.loads(path.read_text())[:6])
    write_json(out/'questions.json', dict(list(json.loads((WORLD/'gqa/val_balanced_questions.json').read_text()).items())[:30]))
    (out/'examples.jsonl').write_text(''.join((WORLD/'winoground/examples.jsonl').read_text().splitlines(True)[:8]))
    for name in ('visual_genome_relation', 'visual_genome_attribution'):
        write_json(out/f'{name}.json', json.loads((WORLD/f'{name}.json').read_text())[::40])
    write_world_half_truths(out, pictures=60, n=3)


def run_pipeline(data, out):
    "Every stage with the default sections, but for the slice, the folder and the size of training."
    sections = yaml.safe_load((ROOT/'params.yaml').read_text())
    folders = {name: str(out/name) for name in ('parse', 'generate', 'units', 'concepts', 'train', 'results', 'variants', 'siglip', 'siglip_runs', 'figures')}
    overrides = {
        'parse': {'karpathy': str(data/'dataset_coco.json'), 'out': folders['parse'], 'shard_size': 20},
        'generate': {'graphs': folders['parse'], 'out': folders['generate'], 'report': f'{folders["results"]}/coverage.json'},
        'units': {'graphs': folders['parse'], 'out': folders['units'], 'report': f'{folders["results"]}/units_coverage.json', 'min_uses': 1},
        'concepts': {'graphs': folders['parse'], 'out': folders['concepts'], 'report': f'{folders["results"]}/concepts.json'},
        'train': {'supervision': folders['generate'], 'units': folders['units'], 'concepts': folders['concepts'], 'out': folders['train'], 'steps': 4, 'batch_size': 8, 'warmup': 1, 'checkpoint_every': 3,
                  'methods': {**sections['train']['methods'], 'negclip': {'batch_size': 4}}},
        'evaluate': {'trained': folders['train'], 'out': folders['results'], 'sugar_crepe': str(data/'sugar_crepe'),
                     'vg_relation': str(data/'visual_genome_relation.json'), 'vg_attribution': str(data/'visual_genome_attribution.json'),
                     'karpathy': str(data/'dataset_coco.json'), 'sugar_crepe_pp': str(data/'scpp'), 'gqa_questions': str(data/'questions.json'),
                     'winoground': str(data/'examples.jsonl'), 'cache': str(out/'evaluate'), 'half_truth': str(data/'half_truth.jsonl')},
        'figures': {'results': folders['results'], 'siglip_results': folders['siglip'], 'siglip_runs': folders['siglip_runs'], 'karpathy': str(data/'dataset_coco.json'),
                    'out': folders['figures']},
        'tables': {'results': folders['results'], 'variants': folders['variants'], 'siglip': folders['siglip'], 'out': f'{folders["results"]}/tables'},
    }
    few = {'out': folders['variants'], 'benchmarks': ['half_truth', 'sugar_crepe']}
    def run_of(name, **more): # of the train stage, which names it so
        method, *variant, seed = name.split('-')
        return {'method': method, **({'variant': variant[0]} if variant else {}), 'seed': int(seed), **more}
    base = sections['siglip']['model']
    other = {'trained': folders['siglip_runs'], 'out': folders['siglip'], 'benchmarks': ['sugar_crepe', 'retrieval']}
    given = {'train': [*map(run_of, (*RUNS[1:], *(f'units-{v}-0' for v in VARIANTS))), *(run_of(r, model=base, out=folders['siglip_runs']) for r in (*SIGLIP, SINGLE))],
             'evaluate': [{'run': r} for r in RUNS] + [{'run': f'units-{v}-0', **few} for v in VARIANTS]
                         + [{'run': 'siglip', 'base_model': base, **other}, *({'run': r, **other} for r in SIGLIP), {'run': SINGLE, **other, **few}]}
    named = 'method', 'variant', 'seed', 'run' # by a copy's name
    for stage, changed in overrides.items():
        for more in given.get(stage, [{}]):
            kept = out/'notebooks'/f'{stage}-{"-".join(str(v) for k, v in more.items() if k in named)}{"-siglip" if "model" in more or "trained" in more else ""}.ipynb'
            run_stage(stage, more, {**sections[stage], **changed}, ROOT, kept)
    return out


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    "Two whole runs in two folders."
    if not WORLD.exists() or not (ROOT/'data/models/clip').exists():
        pytest.fail(f'{ROOT/"data"}: the embedded world is not here; fetch it with `make data`', pytrace=False)
    folder = tmp_path_factory.mktemp('pipeline')
    write_slice(folder/'data')
    return [run_pipeline(folder/'data', folder/name) for name in ('first', 'second')]


def files(folder): return {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob('*')) if p.is_file()}


def test_every_stage_leaves_whole_files_only(runs):
    found = files(runs[0])
    expected = {'parse/part-00000.parquet', 'parse/part-00002.parquet', 'generate/part-00000.parquet', 'generate/coverage.json', 'results/coverage.json',
                'results/tables/table1.csv', 'results/tables/table1.md', 'results/tables/table2.csv', 'results/tables/table2.md',
                *(f'results/tables/{name}.{kind}' for name in ('controlled', 'table3', 'sugar_crepe_pp', 'more') for kind in ('csv', 'md')),
                *(f'figures/{name}.{kind}' for name in ('figure1', 'figure2', 'figure4', 'relations') for kind in ('png', 'pdf')),
                *(f'figures/{f}.{k}' for f in ('units_figure3', 'units_figure5', 'units_figure6', 'units_figure9', 'c2lip_figure2', 'c2lip_kinds', 'siglip_changes') for k in ('png', 'pdf')),
                'units/part-00000.parquet', 'results/units_coverage.json',
                *(f'results/tables/{t}.{k}' for t in ('half_truth', 'half_truth_ordering', 'units_tuning', 'units_placement', 'capabilities',
                                                   'c2lip_table2', 'c2lip_tableA2', 'c2lip_captions', 'all_methods_clip', 'all_methods_siglip') for k in ('csv', 'md')),
                *(f'variants/{r}/half_truth.json' for r in (*(f'units-{v}-0' for v in VARIANTS), SINGLE)),
                'concepts/part-00000.parquet', 'results/concepts.json', *(f'siglip/{r}/sugar_crepe.json' for r in ('siglip', *SIGLIP)),
                *(f'train/{m}-0/{f}' for m in METHODS for f in ('open_clip_config.json', 'open_clip_model.safetensors', 'log.jsonl', 'training.json')),
                *(f'results/{r}/{b}.json' for r in RUNS for b in BENCHMARKS)}
    assert expected <= set(found)
    assert not [name for name in found if name.endswith('.part') or 'checkpoint' in name]
    assert all(p.stat().st_size for p in found.values())


def test_training_took_its_steps(runs):
    for method in METHODS:
        log = [json.loads(line) for line in (runs[0]/f'train/{method}-0/log.jsonl').read_text().splitlines()]
        assert [row['step'] for row in log] == [0, 1, 2, 3]
    assert len({(runs[0]/f'train/{method}-0/open_clip_model.safetensors').read_bytes() for method in METHODS}) == len(METHODS)
    batch_sizes = [json.loads((runs[0]/f'train/{method}-0/training.json').read_text())['parameters']['batch_size'] for method in METHODS]
    assert batch_sizes == [8, 4, 8, 8], 'negclip has a section of its own'
    read = {r: json.loads((runs[0]/f'siglip_runs/{r}/training.json').read_text())['parameters']['captions_per_text'] for r in (*SIGLIP[:3], SINGLE)}
    assert read == {'siglip_ft-0': 2, 'c2lip-0': 2, 'c2lip-npc-0': 2, SINGLE: 1}
    tuned = {v: json.loads((runs[0]/f'train/units-{v}-0/training.json').read_text())['parameters'] for v in VARIANTS}
    assert (tuned['text_only']['tune'], tuned['text_only']['foils'], tuned['no_foils']['tune'], tuned['no_foils']['foils']) == ('text', 'unit', 'both', 'none')


@pytest.mark.parametrize('run', RUNS)
@pytest.mark.parametrize('benchmark', BENCHMARKS)
def test_results_say_what_they_are(runs, run, benchmark):
    result = json.loads((runs[0]/f'results/{run}/{benchmark}.json').read_text())
    method, _, seed = run.partition('-')
    assert (result['benchmark'], result['run'], result['method'], result['seed']) == (benchmark, run, method, int(seed) if seed else None)
    assert result['world'] == 'IconWorld' and result['provenance']
    assert 0 <= result['avg'] <= 1 and 0 <= result['std'] <= .5
    for subset in result['subsets'].values():
        assert 0 <= subset['accuracy'] <= 1 and subset['n'] > 0 and subset['expected'] > 0
        assert ('cohens_d' in subset) == (benchmark == 'controlled') and ('blind' in subset) == (benchmark not in ('retrieval', 'zero_shot'))
    if benchmark == 'sugar_crepe': assert len(result['subsets']) == 7 and all(s['n'] == 6 for s in result['subsets'].values())
    if benchmark == 'controlled': assert set(result['subsets']) == {'object', 'attribute', 'relation'}
    if benchmark == 'half_truth': assert result['subsets']['entity']['n'] == 6 and result['metrics']['shortest_first_ordering'] == 0
    if benchmark == 'retrieval': assert {'i2t_r1', 'i2t_r5', 't2i_r1', 't2i_r5'} <= set(result['metrics'])


def test_results_hold_no_paths(runs):
    for name, path in files(runs[0]/'results').items(): assert str(runs[0].parent) not in path.read_text() and str(ROOT) not in path.read_text(), name


def test_a_second_run_writes_the_same_bytes(runs):
    first, second = (files(run) for run in runs)
    assert set(first) == set(second)
    changed = [name for name in first if not name.startswith('notebooks/') and first[name].read_bytes() != second[name].read_bytes()]
    assert not changed


def test_a_stage_says_which_file_is_missing(runs, tmp_path):
    section = {**yaml.safe_load((ROOT/'params.yaml').read_text())['parse'], 'karpathy': str(tmp_path/'nowhere.json'), 'out': str(tmp_path/'parse')}
    with pytest.raises(StageFailed, match='nowhere.json: cannot be read'): run_stage('parse', section=section, root=ROOT, kept=tmp_path/'kept.ipynb')
    assert not (tmp_path/'parse').exists() and (tmp_path/'kept.ipynb').exists()
