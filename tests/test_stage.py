"""The stage runner: parameters checked before anything runs, the cell's own error, the executed copy kept either way."""
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from cs_clip.files import CSClipError
from cs_clip.stage import StageFailed, main, notebook_parameters, parse_setting, read_section, run_stage


def write_notebook(root, *sources, tags=('parameters',), name='demo'):
    "A stage notebook whose first cell carries `tags`."
    cells = [nbformat.v4.new_code_cell(s, metadata={'tags': list(tags) if i == 0 else []}) for i, s in enumerate(sources)]
    nb = nbformat.v4.new_notebook(cells=cells)
    nb.metadata = {'kernelspec': {'display_name': 'python3', 'language': 'python', 'name': 'python3'}}
    folder = Path(root)/'nbs/pipeline'
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, folder/f'{name}.ipynb')


@pytest.fixture
def project(tmp_path, monkeypatch):
    "An empty project with one stage, `demo`, as the current folder."
    (tmp_path/'settings.ini').touch()
    (tmp_path/'dvc.yaml').touch()
    (tmp_path/'params.yaml').write_text('demo: {x: 1, y: 2}\n')
    write_notebook(tmp_path, 'x = 10\ny = 20', 'print("sum", x + y)')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_section_and_command_line_reach_the_cells(project, capfd):
    assert main(['demo', '--set', 'y=[5, 6]']) == 1, 'int + list fails in the cell'
    assert main(['demo', '--set', 'y=40']) == 0
    out = capfd.readouterr().out
    assert 'sum 41' in out, 'what a cell prints is passed on'
    assert (project/'artifacts/notebooks/demo-40.ipynb').exists()


def test_cells_run_in_the_project_root_wherever_the_caller_stands(project):
    write_notebook(project, 'x = 1', 'from pathlib import Path; Path("here.txt").touch()', name='where')
    (project/'sub').mkdir()
    os.chdir(project/'sub')
    run_stage('where', section={'x': 1})
    assert (project/'here.txt').exists()


@pytest.mark.parametrize('code', ['import os', 'x, y = 1, 2', 'if True:\n    x = 1', 'x =', 'x: int'])
def test_a_parameters_cell_holds_assignments_only(tmp_path, code):
    write_notebook(tmp_path, code)
    with pytest.raises(CSClipError, match='name = value'): notebook_parameters(tmp_path/'nbs/pipeline/demo.ipynb')


def test_exactly_one_parameters_cell(project):
    write_notebook(project, 'x = 1', tags=())
    with pytest.raises(CSClipError, match='0 cells are tagged'): run_stage('demo')
    nb = nbformat.read(project/'nbs/pipeline/demo.ipynb', 4)
    nb.cells = [nbformat.v4.new_code_cell(f'{n} = 1', metadata={'tags': ['parameters']}) for n in 'xy']
    nbformat.write(nb, project/'nbs/pipeline/demo.ipynb')
    with pytest.raises(CSClipError, match='2 cells are tagged'): run_stage('demo')


@pytest.mark.parametrize('args,message', [
    (['demo', '--set', 'steps=4'], 'unknown parameter steps; it takes x, y'),
    (['demo', '--set', 'steps'], 'expected key=value'),
    (['demo', '--set', '=4'], 'expected key=value'),
    (['demo', '--set', 'x=[1'], 'no YAML'),
    (['demo', '--set', 'x=1', '--set', 'x=2'], 'x: given twice, as 1 and as 2'),
    (['parse'], 'no section "parse"; it has demo'),
])
def test_bad_command_lines_are_one_line(project, capsys, args, message):
    assert main(args) == 1
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1
    assert not (project/'artifacts').exists()


@pytest.mark.parametrize('params,message', [
    (None, 'not found'), ('', 'no section "demo"'), ('a: {', 'no YAML'), ('[1, 2]', 'no section'), ('demo: 3', 'no section'),
    ('demo: {x: 1}', 'no value for y'), ('demo: {x: "${nowhere}", y: 1}', 'nowhere'),
])
def test_bad_params_file(project, params, message):
    (project/'params.yaml').unlink()
    if params is not None: (project/'params.yaml').write_text(params)
    with pytest.raises(CSClipError, match=message): run_stage('demo')


def test_a_broken_notebook_is_named(project):
    (project/'nbs/pipeline/demo.ipynb').write_text('{"cells": [')
    with pytest.raises(CSClipError, match='demo.ipynb: no readable notebook'): run_stage('demo')


def test_own_errors_come_without_a_stack(project):
    write_notebook(project, 'x = 1', 'print("before")', 'from cs_clip.files import CSClipError\nraise CSClipError("coco.json: no images")',
                   'open("after.txt", "w")')
    (project/'params.yaml').write_text('demo: {x: 1}\n')
    done = subprocess.run([sys.executable, '-m', 'cs_clip.stage', 'demo'], capture_output=True, text=True)
    assert done.returncode == 1 and 'error: demo: coco.json: no images\n' in done.stderr
    assert 'Traceback' not in done.stderr + done.stdout and 'before' in done.stdout
    assert not (project/'after.txt').exists()
    kept = nbformat.read(project/'artifacts/notebooks/demo.ipynb', 4)
    assert any(o.output_type == 'error' for c in kept.cells for o in c.get('outputs', ())), 'the copy shows where it failed'


def test_other_errors_keep_their_name(project):
    write_notebook(project, 'x = 1', '1/0')
    with pytest.raises(StageFailed, match='^demo: ZeroDivisionError: division by zero'): run_stage('demo', section={'x': 1})


def test_a_killed_kernel_is_reported(project):
    write_notebook(project, 'x = 1', 'import os; os.kill(os.getpid(), 9)')
    with pytest.raises(StageFailed, match='was killed'): run_stage('demo', section={'x': 1})


def test_settings_are_yaml():
    given = ['a=1', 'b=1e-5', 'c=null', 'd=[x, y]', 'e=local-dir:data/models/clip', 'f={sg: {lr: 0.1}}', 'g=true', 'h=a=b', 'i=']
    assert [parse_setting(s)[1] for s in given] == [1, 1e-5, None, ['x', 'y'], 'local-dir:data/models/clip', {'sg': {'lr': .1}}, True, 'a=b', None]


def test_a_section_reads_as_it_was_written(tmp_path):
    section = {'a': 1e-5, 'b': [1, 'x'], 'c': None, 'd': {'e': True}}
    (tmp_path/'params.yaml').write_text(yaml.safe_dump({'demo': section}))
    assert read_section(tmp_path/'params.yaml', 'demo') == section


def test_a_section_without_a_notebook(project):
    with pytest.raises(CSClipError, match='no such stage notebook; there are demo'): run_stage('other', section={})
