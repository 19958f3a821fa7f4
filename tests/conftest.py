"Tiny random text models, saved as folders, for what only needs their interface."
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (BertConfig, BertForMaskedLM, BertForSequenceClassification, BertTokenizerFast, PreTrainedTokenizerFast,
                          RobertaConfig, RobertaForMaskedLM)

WORDS = '''a an the and is of to in on under above next left right dog dogs cat cats horse man apple umbrella table red blue green orange
    big small riding holding carrying one two three . ,'''.split()
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)

def wordpiece():
    special = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
    return BertTokenizerFast(vocab={t: i for i, t in enumerate([*special, *WORDS, '##s', '##ing', 'x'])}, model_max_length=64)

def bert(cls, folder, **kw):
    torch.manual_seed(0)
    tokenizer = wordpiece()
    cls(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=.5, **SIZES, **kw)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

@pytest.fixture(scope='session')
def bert_mlm(tmp_path_factory):
    "A folder with a random `BertForMaskedLM` and a WordPiece tokenizer."
    return bert(BertForMaskedLM, tmp_path_factory.mktemp('bert'))

@pytest.fixture(scope='session')
def roberta_mlm(tmp_path_factory):
    "A folder with a random `RobertaForMaskedLM` and a byte-level BPE tokenizer: words are tokens only with a space before them."
    folder = tmp_path_factory.mktemp('roberta')
    vocab = {t: i for i, t in enumerate(['<s>', '<pad>', '</s>', '<unk>', '<mask>'])}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for token in (*letters, *('Ġ' + w for w in WORDS if w.isalpha())):
        for n in range(2, len(token) + 1):
            if token[:n] not in vocab: merges.append((token[:n-1], token[n-1])); vocab[token[:n]] = len(vocab)
        vocab.setdefault(token, len(vocab))
    backend = Tokenizer(models.BPE(vocab, merges, unk_token='<unk>'))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(('</s>', vocab['</s>']), ('<s>', vocab['<s>']), add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token='<s>', eos_token='</s>', pad_token='<pad>', unk_token='<unk>',
                                        mask_token='<mask>', model_max_length=64, model_input_names=['input_ids', 'attention_mask'])
    tokenizer.add_special_tokens({'mask_token': AddedToken('<mask>', lstrip=True, special=True)})
    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=1, initializer_range=.5, **SIZES)
    RobertaForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

@pytest.fixture(scope='session')
def nli(tmp_path_factory):
    "A folder with a random sequence classifier of entailment, neutral and contradiction."
    labels = dict(enumerate(('entailment', 'neutral', 'contradiction')))
    return bert(BertForSequenceClassification, tmp_path_factory.mktemp('nli'), id2label=labels, label2id={v: k for k, v in labels.items()})
