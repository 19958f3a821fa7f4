"""Trains a micro model in a process of its own, which a test may kill: train_script.py MODEL IMAGES OUT STEPS"""
import sys
from cs_clip.data import ImageStore, Pixels
from cs_clip.models import load
from cs_clip.objectives import NegCLIP
from cs_clip.training import train
from tiny_clip import tiny_records

model, images, out, steps = sys.argv[1:]
encoder = load(model)
train(NegCLIP(tiny_records()), encoder, Pixels(ImageStore(images), encoder.preprocess, keep=True), out,
      steps=int(steps), batch_size=8, lr=1e-3, warmup=4, checkpoint_every=6)
