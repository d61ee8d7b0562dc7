# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Steps of a training of LeNet's shape with tinygrad: prints milliseconds of a step, median of the second half of `lenet.py STEPS`. Arguments of the training are in tinygrad_digits.py, beside it."""

import random
import sys
import time

import tinygrad_digits as digits
from tinygrad import Context, Tensor, TinyJit, dtypes, nn


def main():
    steps = int(sys.argv[1])
    rows, labels = digits.digits()
    Tensor.manual_seed(7)
    net = digits.LeNet()
    optimizer = nn.optim.Adam(nn.state.get_parameters(net), lr=0.004)

    @TinyJit
    def step(batch, wanted):
        optimizer.zero_grad()
        loss = net(batch).sparse_categorical_crossentropy(wanted).backward()
        optimizer.step()
        return loss.realize()

    chooser, times = random.Random(8), []
    with Context(TRAINING=1):
        for _ in range(steps):
            chosen = chooser.choices(range(len(rows)), k=digits.BATCH)
            begun = time.monotonic()
            wanted = Tensor([labels[i] for i in chosen], dtype=dtypes.int32).realize()
            step(digits.images([rows[i] for i in chosen]), wanted).item()
            times.append(time.monotonic() - begun)
    half = sorted(times[steps // 2 :])
    print(1000 * half[len(half) // 2])


if __name__ == "__main__":
    main()
