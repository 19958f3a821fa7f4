"""Tables: means by hand, references and intervals beside them, every seed counted, and nothing that is missing goes unsaid."""
import csv

import numpy as np
import pandas as pd
import pytest

from cs_clip.files import CSClipError, read_json, write_json
from cs_clip.published import published
from cs_clip.tables import (SIGLIP_TABLES, TABLES, VARIANTS, Column, Table, all_methods, load_measured, measured_cells, table_csv, table_text, write_tables)
from test_figures import KINDS, change, results, write_run  # noqa: F401  (a fixture)

SIGLIP = {'siglip': .6, **{f'{m}-{s}': b + s/100 for m, b in (('siglip_ft', .65), ('c2lip-npc', .7), ('c2lip', .75)) for s in range(3)},
          **{f'{m}-0': .68 for m in ('clip_ft', 'negclip', 'sg', 'units')}}
GRID = ['c2lip-npc_half_xac_half', 'c2lip-npc_half_xac_tenth', 'c2lip-npc_half', 'c2lip-xac_half']
SINGLE = ['siglip_ft-single', 'c2lip-npc_single', 'c2lip-single']
UNITS = {run for table in VARIANTS.values() for run in table.rows if '-' in run}


@pytest.fixture
def variants(tmp_path):
    for name in (*UNITS, *GRID): write_run(tmp_path/'variants', f'{name}-0', .5)
    for run in SINGLE:
        for seed in range(3): write_run(tmp_path/'variants', f'{run}-{seed}', .55)
    return tmp_path/'variants'


@pytest.fixture
def siglip(tmp_path):
    for run, base in SIGLIP.items(): write_run(tmp_path/'siglip', run, base)
    return tmp_path/'siglip'


def frame(*rows): # (run, subset, metric, value, n): as of `load_results`, on a benchmark of ten items
    return pd.DataFrame([dict(method=run.rstrip('-0123456789'), seed=int(run[-1]) if run[-1].isdigit() else None, run=run, benchmark='sugar_crepe', world='W',
                              subset=subset, metric=metric, value=value, n=n, expected=10) for run, subset, metric, value, n in rows]).astype({'seed': 'Int64'})


def line(text, start): return next(row for row in text.splitlines() if row.startswith(start))


COLUMNS = [Column('a', 'A', 'sugar_crepe', 'a', 'accuracy'), Column('both', 'Both', 'sugar_crepe', ('a', 'b'), 'accuracy'),
           Column('four', 'Four', 'sugar_crepe', ('a', 'b'), ('accuracy', 'tot'))]
SMALL = frame(('sg-0', 'a', 'accuracy', .5, 10), ('sg-0', 'b', 'accuracy', .7, 10), ('sg-1', 'a', 'accuracy', .6, 10), ('sg-1', 'b', 'accuracy', .8, 10),
              ('sg-0', 'a', 'tot', .1, 10), ('sg-0', 'b', 'tot', .3, 10), ('clip', 'a', 'accuracy', .4, 10), ('negclip-0', 'a', 'accuracy', .4, 8))


def test_means_by_hand():
    cells = measured_cells(Table('T', None, '', COLUMNS, '', False), SMALL)
    assert cells['sg']['a'][:4] == pytest.approx((55, np.std([50, 60], ddof=1), 2, True))
    assert cells['sg']['both'].value == pytest.approx(65), 'the mean of 60 and 70, over runs of 50 and 70, 60 and 80'
    assert cells['sg']['four'][:3] == pytest.approx((40, None, 1)) and not cells['sg']['four'].whole, 'seed 1 lacks TOT'
    assert list(cells['clip']) == ['a'] and cells['clip']['a'].whole, 'a mean of two subsets needs both'
    assert not cells['negclip']['a'].whole, '8 of 10 items, 1 of 2 seeds'


def test_what_is_missing_is_a_dash_and_is_said_below():
    text = table_text(Table('T', None, '', COLUMNS, '', False), SMALL, 'W')
    assert line(text, '| CLIP |') == '| CLIP | 40.0 | – | – |' and line(text, '| NegCLIP') == '| NegCLIP | 40.0 † | – | – |'
    assert line(text, '| CS-CLIP (sg)') == '| CS-CLIP (sg) | 55.0 ± 7.1 | 65.0 ± 7.1 | 40.0 † |'
    for said in ('sugar_crepe: not measured for CLIP-FT, CS-CLIP (units)', 'sugar_crepe: NegCLIP has 1 of 2 seeds', 'sugar_crepe, a: NegCLIP on 8 of 10 items'):
        assert f'† {said}' in text


def test_a_column_of_seeds_says_what_else_a_dagger_would():
    table = Table('T', None, '', COLUMNS[:1], '', False, rows={'sg': 'whole', 'negclip': 'part', 'units': 'none'}, seeds=True)
    text = table_text(table, SMALL, 'W')
    assert line(text, '| whole') == '| whole | 2 | 55.0 ± 7.1 |' and line(text, '| part') == '| part | 1 | 40.0 † |' # of 8 items
    assert line(text, '| none') == '| none | – | – |' and 'of 2 seeds' not in text and '† sugar_crepe: not measured for none' in text


def test_chance_and_blind_reader_stand_below(results):
    for run in results.iterdir():
        result = read_json(run/'sugar_crepe.json')
        subsets = {k: {**s, 'chance': .5, 'blind': .5 + KINDS.index(k)/100} for k, s in result['subsets'].items()}
        change(run/'sugar_crepe.json', subsets=subsets, metrics={'chance': .5, 'blind': .53})
        change(run/'half_truth.json', metrics={'blind': .9, 'blind_ordering': .02, 'correct_ordering': .3})
    measured = load_measured(results, 'IconWorld')
    csv = table_csv(TABLES['table1'], measured, 'IconWorld').set_index(['source', 'method'])
    assert csv.loc[('blind reader', 'blind reader'), ['swap_obj', 'avg', 'incomplete']].tolist() == [53, 53, '']
    assert csv.loc[('chance', 'chance'), ['avg', 'std', 'avg_sd']].isna().tolist() == [False, True, True]
    text = table_text(TABLES['table1'], measured, 'IconWorld').split('**published')[0]
    assert [row.split(' | ')[0] for row in text.splitlines() if row.startswith('| ')][-3:] == ['| CS-CLIP (units)', '| chance', '| blind reader']
    text = table_text(TABLES['half_truth_ordering'], measured, 'IconWorld')
    assert line(text, '| blind reader').startswith('| blind reader | 2.0 | ') and '| chance' not in text and 'guessing' not in text


def trained(folder, run, **parameters):
    for path in (folder/run).iterdir(): change(path, provenance={'training': {'parameters': parameters}})


def test_training_is_said_as_it_was(results, variants):
    for folder in (results, variants):
        for run in folder.iterdir():
            trained(folder, run.name, steps=450, batch_size=64, lr=.001 if 'units' in run.name else .0002)
    both = pd.concat([load_measured(results, 'IconWorld'), load_measured(variants, 'IconWorld')])
    assert 'Trained for 450 steps of 64 pictures at a learning rate of 0.001. ' in table_text(VARIANTS['units_tuning'], both, 'IconWorld')
    assert 'rate of 0.0002 (none (CLIP-FT)) and 0.001 (G; G U; U F; G U F). ' in table_text(VARIANTS['units_signals'], both, 'IconWorld')


def test_captions_of_a_text_are_said_where_some_have_several(siglip):
    def said(**of):
        for run in siglip.iterdir(): trained(siglip, run.name, **{**({'captions_per_text': n} if (n := of.get(run.name.split('-')[0])) else {}), 'steps': 9})
        found = load_measured(siglip, 'IconWorld')
        return [line(table_text(t, found, 'IconWorld'), 'Accuracy').split('Trained ')[1].split('. ')[0] for t in (all_methods(found, 'SigLIP'), SIGLIP_TABLES['c2lip_table5'])]
    assert said(siglip_ft=1, c2lip=1) == ['for 9 steps']*2, 'one is what everybody expects'
    mixed, whole = said(siglip_ft=2, c2lip=2)
    assert whole == 'for 9 steps with 2 captions a text'
    assert mixed == 'for 9 steps with 1 (CLIP-FT; NegCLIP; CS-CLIP (sg); CS-CLIP (units)) and 2 (SigLIP-FT; C²LIP, npc alone; C²LIP) captions a text'


def test_variants_stand_beside_the_whole_method(results, variants, tmp_path):
    write_tables(results, tmp_path/'tables', 'IconWorld', variants)
    csv = pd.read_csv(tmp_path/'tables/units_signals.csv').set_index(['source', 'method'])
    assert csv.loc['measured'].loc[['clip_ft', 'clip_ft (seed 0)', 'units-no_foils', 'units', 'units (seed 0)'], 'all'].tolist() == [66, 65, 50, 76, 75]
    assert csv.loc['measured', 'seeds'].tolist() == [3, 1, 1, 1, 1, 3, 1]
    assert csv.loc[('published', 'units'), 'relation'] == 79.2 and csv.loc[('published', 'units-no_foils'), 'all'] == 47.7
    assert ('published', 'units-no_units') not in csv.index
    text = (tmp_path/'tables/units_signals.md').read_text()
    assert 'measured: IconWorld, 1–3 seeds' in text and line(text, '| G U F |').startswith('| G U F | 3 | 76.0 ± 1.0 |')
    assert line(text, '| G U F, seed 0').startswith('| G U F, seed 0 | 1 | 75.0 |') and '†' not in text


def test_variants_with_all_seeds_need_no_second_row(results, variants):
    for seed in (1, 2):
        for name in UNITS: write_run(variants, f'{name}-{seed}', .5)
    both = pd.concat([load_measured(results, 'IconWorld'), load_measured(variants, 'IconWorld')])
    for table in VARIANTS.values():
        text = table_text(table, both, 'IconWorld')
        assert ', seed' not in text.split('\n\n')[2] and 'IconWorld, 3 seeds' in text


def test_tables_on_a_siglip(results, variants, siglip, tmp_path):
    texts = write_tables(results, tmp_path/'tables', 'IconWorld', variants, siglip)
    assert {*SIGLIP_TABLES, 'all_methods_clip', 'all_methods_siglip'} < set(texts)
    read = lambda name: pd.read_csv(tmp_path/f'tables/c2lip_{name}.csv').set_index(['source', 'method'])
    own = read('table2').loc[('measured', 'c2lip')]
    base = {k: 76 + 2*i for i, k in enumerate(KINDS)}
    for edit in ('add', 'replace', 'swap'): assert own[edit] == pytest.approx(np.mean([v for k, v in base.items() if k.startswith(edit)]))
    assert own[['replace_i2t', 'swap_tot', 'mscoco']].tolist() == pytest.approx([56, 66, 76/2 + 10])
    assert read('table2').loc[('published', 'C2LIP (from Table 6)'), ['add', 'replace', 'swap', 'swap_i2t']].tolist() == [93.3, 89.1, 75.2, 55.2]
    assert read('tableA4').loc[('measured', 'siglip'), 'average'] == pytest.approx((40 + 50)/2)
    assert read('tableA2').loc['measured']['seeds'].to_dict() == {**dict.fromkeys(GRID, 1), 'c2lip': 3, 'c2lip (seed 0)': 1}
    assert line(texts['c2lip_tableA2'], '| 0.5, 0.1 |').endswith('| 85.2 |') and line(texts['c2lip_tableA2'], '| 1, 0.01 |').endswith('| 85.6 |')
    assert line(texts['c2lip_table5'], '| + npc + xac').endswith('| 85.6 | 96.4 |') and 'NegCLIP' not in texts['c2lip_table5']
    average = {row.split(' |')[0].strip('| '): row.split('|')[10].split('±')[0].strip() for row in texts['c2lip_captions'].splitlines() if row.startswith(('| single:', '| several:'))}
    assert average == {**{f'single: {part}': '61.0' for part in ('fine-tuned', '+ npc', '+ npc + xac')}, 'several: fine-tuned': '72.0', 'several: + npc': '77.0', 'several: + npc + xac': '82.0'}
    for name, table in SIGLIP_TABLES.items():
        assert 'measured: IconWorld, ' in texts[name] and '†' not in texts[name] and ('published: ' in texts[name]) == bool(table.published)
        assert f'published: {table.source}' in texts[name] or not table.published
        assert all(len({row.count('|') for row in block.splitlines()}) == 1 for block in texts[name].split('\n\n') if block.startswith('|'))


def test_averages_of_the_papers_rows_are_averages():
    for name, table in SIGLIP_TABLES.items():
        if name not in ('c2lip_tableA3', 'c2lip_tableA4', 'c2lip_tableA5', 'c2lip_tableA6', 'c2lip_table2'): continue
        rows = published(table.published).set_index('model').dropna()
        of = {k: [c for c in rows if c.startswith(k.split('_')[0]) and c.endswith(k.split('_')[-1] if '_' in k else '') and c.count('_') > k.count('_')]
              for k in rows if k.split('_')[0] in ('replace', 'swap', 'add') and 'obj' not in k and 'att' not in k and 'rel' not in k}
        whole = [c for c in rows if c not in ('average', *of)]
        for k, columns in {**of, 'average': whole}.items():
            assert rows[columns].mean(axis=1).sub(rows[k]).abs().max() < .06, (name, k)


def test_all_methods_have_intervals_over_items(results, siglip, tmp_path):
    for seed in range(3): change(results/f'sg-{seed}/sugar_crepe.json', interval=[.7 + seed/100, .9])
    change(results/'clip/half_truth.json', metrics={'correct_ordering': .3, 'correct_ordering_interval': [.25, .35]})
    measured = load_measured(results, 'IconWorld')
    table = all_methods(measured)
    csv = table_csv(table, measured, 'IconWorld').set_index('method')
    assert csv.loc['sg', ['sugar_crepe', 'sugar_crepe_sd', 'sugar_crepe_low', 'sugar_crepe_high', 'seeds']].tolist() == [81, 1, 71, 90, 3]
    assert csv.loc['clip', ['half_truth_ordering_low', 'half_truth_ordering_high']].tolist() == [25, 35] and pd.isna(csv.loc['clip', 'sugar_crepe_low'])
    text = table_text(table, measured, 'IconWorld')
    assert '| CS-CLIP (sg) | 3 | 81.0 ± 1.0<br>[71.0, 90.0] |' in text and '| CLIP | – | 60.0 |' in text and '†' not in text
    text = table_text(all_methods(load := load_measured(siglip, 'IconWorld'), 'SigLIP'), load, 'IconWorld')
    assert [row.split(' | ')[:2] for row in text.splitlines() if row.startswith('| ')][2:-1] == [
        ['| SigLIP', '–'], ['| SigLIP-FT', '3'], ['| C²LIP, npc alone', '3'], ['| C²LIP', '3'], ['| CLIP-FT', '1'], ['| NegCLIP', '1'],
        ['| CS-CLIP (sg)', '1'], ['| CS-CLIP (units)', '1']]


def test_a_benchmark_of_a_users_own_has_a_column(results):
    write_json(results/'sg-0/valse.json', {**read_json(results/'sg-0/gqa.json'), 'benchmark': 'valse'})
    measured = load_measured(results, 'IconWorld')
    text = table_text(all_methods(measured), measured, 'IconWorld')
    assert line(text, '| CS-CLIP (sg)').endswith('| 80.0 † |') and '† valse: CS-CLIP (sg) has 1 of 3 seeds' in text


def test_half_truths_of_every_source_are_there(results):
    measured = load_measured(results, 'IconWorld')
    csv = table_csv(TABLES['half_truth_sources'], measured, 'IconWorld').set_index(['source', 'method'])
    for row in published('halftruth_table1').itertuples():
        found = csv.loc[('published', f'{row.source}, {row.model}')]
        assert (found['all'], found['relation'] if pd.notna(row.relation) else None) == (row.all, row.relation if pd.notna(row.relation) else None)
    csv = table_csv(TABLES['half_truth_beside'], measured, 'IconWorld').set_index(['source', 'method'])
    columns = ['all', 'ordering_COCO (Mistral)', 'acc1', 'acc5', 'i2t_r1', 't2i_r1']
    assert csv.loc[('published', 'CS-CLIP'), columns].tolist() == [69.9, 50.4, 59.9, 84.6, 56.8, 71.7]
    assert csv.loc[('measured', 'units'), ['all', 'ordering', 'acc1', 't2i_r1']].tolist() == pytest.approx([76, 38, 76, 40])
    assert {m for s, m in csv.index if s == 'published'} == {'CLIP', 'NegCLIP', 'FSC-CLIP', 'CS-CLIP', 'unit-only ablation', 'COCO fine-tuning'}


def test_same_bytes_again_and_only_of_folders_that_are_given(results, variants, siglip, tmp_path):
    for name in ('a', 'b'): write_tables(results, tmp_path/name, 'IconWorld', variants, siglip)
    files = [{p.name: p.read_bytes() for p in (tmp_path/name).iterdir()} for name in ('a', 'b')]
    assert files[0] == files[1] and len(files[0]) == 2*len({**TABLES, **VARIANTS, **SIGLIP_TABLES}) + 4
    write_tables(results, tmp_path/'c', 'IconWorld')
    assert {p.stem for p in (tmp_path/'c').iterdir()} == {*TABLES, 'all_methods_clip'}
    for path in (tmp_path/'a').glob('*.csv'):
        with path.open(newline='') as f: assert len({len(row) for row in csv.reader(f)}) == 1
    with pytest.raises(CSClipError, match='run the evaluate stage first'): write_tables(results, tmp_path/'d', 'IconWorld', siglip=tmp_path/'none')
    assert not (tmp_path/'d').exists()
