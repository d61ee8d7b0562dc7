# SPDX-License-Identifier: Apache-2.0 OR MIT
"""tinygrad trains a net on handwritten digits: `tinygrad_digits.py small|lenet STEPS LEAST`, with digits.csv.gz in the folder TOMBOLO_DIGITS.

Prints each step's loss with all its digits, so that two runs can be compared, and the share of unseen digits that it then names; fails
where that share, in percent, is below LEAST. `small` is one layer; `lenet` has two convolutions and two layers.
"""

import csv
import gzip
import os
import random
import sys

from tinygrad import Context, Tensor, TinyJit, dtypes, nn

BATCH = 64


class Small:
    def __init__(self):
        self.last = nn.Linear(64, 10)

    def __call__(self, images):
        return self.last(images.flatten(1))


class LeNet:
    def __init__(self):
        self.first = nn.Conv2d(1, 12, 3, padding=1)
        self.second = nn.Conv2d(12, 24, 3, padding=1)
        self.hidden = nn.Linear(24 * 2 * 2, 48)
        self.last = nn.Linear(48, 10)

    def __call__(self, images):
        halved = self.first(images).relu().max_pool2d()
        quartered = self.second(halved).relu().max_pool2d().flatten(1)
        return self.last(self.hidden(quartered).relu())


def digits():
    """Images of 8 by 8 numbers, and what they show."""
    with gzip.open(os.environ["TOMBOLO_DIGITS"] + "/digits.csv.gz", "rt") as file:
        rows = [[float(cell) for cell in row] for row in csv.reader(file)]
    random.Random(7).shuffle(rows)
    return [[cell / 16 for cell in row[:-1]] for row in rows], [int(row[-1]) for row in rows]


def images(rows):
    return Tensor(rows).reshape(-1, 1, 8, 8).realize()


def train(net, rows, labels, steps):
    optimizer = nn.optim.Adam(nn.state.get_parameters(net), lr=0.004)

    @TinyJit
    def step(batch, wanted):
        optimizer.zero_grad()
        loss = net(batch).sparse_categorical_crossentropy(wanted).backward()
        optimizer.step()
        return loss.realize()

    chooser = random.Random(8)
    for number in range(steps):
        chosen = chooser.choices(range(len(rows)), k=BATCH)
        wanted = Tensor([labels[i] for i in chosen], dtype=dtypes.int32).realize()
        print(f"step {number}: loss {step(images([rows[i] for i in chosen]), wanted).item()!r}", flush=True)


def main():
    kind, steps, least = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    rows, labels = digits()
    seen = len(rows) * 4 // 5
    Tensor.manual_seed(7)
    net = {"small": Small, "lenet": LeNet}[kind]()
    with Context(TRAINING=1):
        train(net, rows[:seen], labels[:seen], steps)
    named = net(images(rows[seen:])).argmax(1).tolist()
    share = 100 * sum(a == b for a, b in zip(named, labels[seen:])) / len(named)
    print(f"{share:.2f} % of {len(named)} unseen digits")
    if share < least:
        sys.exit(f"less than {least} %")
    print("ok")


if __name__ == "__main__":
    main()
