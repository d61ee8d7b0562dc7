// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cost of measured noise to a bulk-synchronous program: a model, not a measurement. In each step every rank does a quantum of fixed work,
//! then all wait for the last one. Each rank's quantum is drawn from the measured ones, independently of the others.
//!
//! The longest of N draws from m measured quanta is not found by drawing: it is at most the i-th smallest quantum with the probability (i/m)^N,
//! so its mean and its quantiles are sums over the m quanta, for one rank as for a million. How far the mean depends on which quanta happened to be
//! measured is estimated by bootstrap: the same for as many quanta drawn from the measured ones with replacement.

use serde::{Deserialize, Serialize};

/// More ranks than any machine has.
pub const MOST_RANKS: u64 = 1_000_000;
/// Samples of the bootstrap.
const SAMPLES: usize = 200;
/// The share of samples below the lower and above the upper bound.
const OUTSIDE: f64 = 0.05;
/// The generator's seed, so that the same quanta give the same bounds.
const SEED: u64 = 0x746f_6d62_6f6c_6f00;

/// The model's result for a number of ranks. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Ranks.
    pub ranks: u64,
    /// The mean length of a step.
    pub mean_ns: f64,
    /// Nine of ten bootstrap samples have a mean above this one and below the next.
    pub low_ns: f64,
    /// See [`Step::low_ns`].
    pub high_ns: f64,
    /// The mean length over the shortest measured quantum.
    pub slowdown: f64,
}

/// The model for 1, 10, 100 … and `ranks` ranks; nothing without quanta.
pub fn steps(quanta_ns: &[f64], ranks: u64) -> Vec<Step> {
    let mut sorted = quanta_ns.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(shortest) = sorted.first().copied() else { return Vec::new() };
    let mut counts: Vec<u64> =
        std::iter::successors(Some(1), |count| Some(count * 10)).take_while(|count| *count < ranks).collect();
    counts.push(ranks);
    let weights = vec![1; sorted.len()];
    let samples = samples(sorted.len());
    let step = |ranks: u64| {
        let mean_ns = mean_of_longest(&sorted, &weights, ranks);
        let mut means: Vec<f64> =
            samples.iter().map(|sample| mean_of_longest(&sorted, sample, ranks)).collect();
        means.sort_by(f64::total_cmp);
        let outside = (means.len() as f64 * OUTSIDE) as usize;
        let (low_ns, high_ns) = (means[outside], means[means.len() - 1 - outside]);
        Step { ranks, mean_ns, low_ns, high_ns, slowdown: mean_ns / shortest }
    };
    counts.into_iter().map(step).collect()
}

/// Bootstrap samples: how often each of `quanta` is drawn in as many draws.
fn samples(quanta: usize) -> Vec<Vec<u32>> {
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut sample = || {
        let mut counts = vec![0; quanta];
        (0..quanta).for_each(|_| counts[random.usize(0..quanta)] += 1);
        counts
    };
    (0..SAMPLES).map(|_| sample()).collect()
}

/// The mean of the longest of `ranks` draws from values in ascending order, each as likely as its weight says.
fn mean_of_longest(sorted: &[f64], weights: &[u32], ranks: u64) -> f64 {
    let all: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
    let (mut below, mut before, mut mean) = (0.0, 0.0, 0.0);
    for (value, weight) in sorted.iter().zip(weights) {
        below += f64::from(*weight);
        // (i/m)^N; the logarithm keeps its precision near 1, where it matters for many ranks.
        let probability = (ranks as f64 * (-((all - below) / all)).ln_1p()).exp();
        mean += value * (probability - before);
        before = probability;
    }
    mean
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The mean of the longest of all combinations of draws.
    fn by_brute_force(values: &[f64], ranks: u32) -> f64 {
        let combinations = values.len().pow(ranks);
        let longest = |mut combination: usize| {
            let mut longest = f64::MIN;
            for _ in 0..ranks {
                longest = longest.max(values[combination % values.len()]);
                combination /= values.len();
            }
            longest
        };
        (0..combinations).map(longest).sum::<f64>() / combinations as f64
    }

    #[test]
    fn a_million_ranks_meet_the_longest_quantum_in_nearly_each_step() {
        let mut quanta = vec![1e6; 9999];
        quanta.push(3e6);
        let steps = steps(&quanta, MOST_RANKS);
        let ranks: Vec<u64> = steps.iter().map(|step| step.ranks).collect();
        assert_eq!(ranks, [1, 10, 100, 1000, 10_000, 100_000, 1_000_000]);
        assert!((steps[0].mean_ns - 1_000_200.0).abs() < 1.0, "{steps:?}");
        // 1 - (1 - 1/10000)^10000 of the steps.
        assert!((steps[4].slowdown - 2.2643).abs() < 1e-3, "{steps:?}");
        assert!((steps[6].slowdown - 3.0).abs() < 1e-9, "{steps:?}");
        assert!(steps.iter().all(|step| step.low_ns <= step.high_ns));
        // Some samples have the long quantum, others do not.
        assert!(steps[6].low_ns < 1.1e6 && steps[6].high_ns > 2.9e6, "{steps:?}");
    }

    #[test]
    fn without_noise_nothing_is_lost_and_without_quanta_nothing_is_said() {
        assert!(steps(&[], 100).is_empty());
        assert!(steps(&[5.0; 20], 1000).iter().all(|step| (step.slowdown - 1.0).abs() < 1e-9));
    }

    proptest! {
        #[test]
        fn the_mean_is_that_of_all_combinations(
            mut values in proptest::collection::vec(1.0f64..1000.0, 1..6), ranks in 1u32..6,
        ) {
            values.sort_by(f64::total_cmp);
            let mean = mean_of_longest(&values, &vec![1; values.len()], ranks.into());
            let brute = by_brute_force(&values, ranks);
            prop_assert!((mean - brute).abs() <= 1e-9 * brute, "{mean} {brute}");
        }

        #[test]
        fn a_weight_is_as_many_equal_quanta(
            draws in proptest::collection::vec((1.0f64..1000.0, 1u32..5), 1..20), ranks in 1u64..1_000_000,
        ) {
            let mut draws = draws;
            draws.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (values, weights): (Vec<f64>, Vec<u32>) = draws.iter().copied().unzip();
            let each: Vec<f64> = draws.iter().flat_map(|(value, weight)| vec![*value; *weight as usize]).collect();
            let (weighted, plain) = (
                mean_of_longest(&values, &weights, ranks), mean_of_longest(&each, &vec![1; each.len()], ranks),
            );
            prop_assert!((weighted - plain).abs() <= 1e-6 * plain, "{weighted} {plain}");
        }

        #[test]
        fn more_ranks_never_wait_less(
            values in proptest::collection::vec(1.0f64..1000.0, 1..50), ranks in 1u64..1_000_000,
        ) {
            let steps = steps(&values, ranks);
            prop_assert_eq!(steps.last().unwrap().ranks, ranks);
            prop_assert!(steps.windows(2).all(|two| two[0].mean_ns <= two[1].mean_ns * (1.0 + 1e-12)));
        }
    }
}
