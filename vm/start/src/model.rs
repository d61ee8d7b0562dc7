// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A model of a start's time, from costs measured per GiB and per mapping, for sizes that no lab holds. It is a model: it assumes that
//! every cost is linear in what it is per, which holds in the range it was measured in.

use serde::{Deserialize, Serialize};

use crate::layout::{GIB, Layout, LayoutError, Wish};

/// Costs in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Of a start that maps no memory.
    pub base: f64,
    /// Of allocating, zeroing, pinning and mapping one GiB before the first instruction.
    pub slow_per_gib: f64,
    /// Of pinning, mapping and adding one GiB of prepared memory to a running guest.
    pub plug_per_gib: f64,
    /// Of preparing one GiB, on all threads together.
    pub prepare_per_gib: f64,
}

/// The model's result for one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Forecast {
    /// GiB of the VM.
    pub gib: f64,
    /// Seconds to the first instruction, all memory mapped first.
    pub slow: f64,
    /// Seconds to the first instruction, fast.
    pub fast: f64,
    /// Seconds to full memory, fast; preparing runs beside plugging.
    pub fast_full: f64,
    /// DMA mappings that growing takes.
    pub mappings: u64,
}

#[expect(clippy::cast_precision_loss, reason = "a model")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

/// Fits `base` and `slow_per_gib` to measured slow starts (bytes, seconds) by least squares. None with fewer than two sizes.
pub fn fit(starts: &[(u64, f64)]) -> Option<(f64, f64)> {
    #[expect(clippy::cast_precision_loss, reason = "a handful of points")]
    let count = starts.len() as f64;
    let mean_x = starts.iter().map(|(bytes, _)| gib(*bytes)).sum::<f64>() / count;
    let mean_y = starts.iter().map(|(_, seconds)| seconds).sum::<f64>() / count;
    let variance = starts.iter().map(|(bytes, _)| (gib(*bytes) - mean_x).powi(2)).sum::<f64>();
    if starts.len() < 2 || variance == 0.0 {
        return None;
    }
    let together =
        starts.iter().map(|(bytes, seconds)| (gib(*bytes) - mean_x) * (seconds - mean_y)).sum::<f64>();
    let slope = together / variance;
    Some((mean_y - slope * mean_x, slope))
}

impl Costs {
    /// The forecast for a VM of `total` bytes.
    pub fn forecast(&self, total: u64) -> Result<Forecast, LayoutError> {
        let layout: Layout =
            Wish { total, boot: None, dma_entries: crate::layout::DEFAULT_DMA_ENTRIES }.layout()?;
        let fast = self.base + self.slow_per_gib * gib(layout.boot);
        let growing = gib(layout.grown) * self.plug_per_gib.max(self.prepare_per_gib);
        Ok(Forecast {
            gib: gib(total),
            slow: self.base + self.slow_per_gib * gib(total),
            fast,
            fast_full: fast + growing,
            mappings: layout.mappings(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_fitted_exactly_and_one_size_is_not_enough() {
        let (base, slope) = fit(&[(GIB, 3.0), (2 * GIB, 5.0), (4 * GIB, 9.0)]).unwrap();
        assert!((base - 1.0).abs() < 1e-9 && (slope - 2.0).abs() < 1e-9);
        assert_eq!(fit(&[(GIB, 3.0), (GIB, 3.5)]), None);
    }

    #[test]
    fn the_fast_start_stops_growing_with_the_memory() {
        let costs = Costs { base: 1.0, slow_per_gib: 0.3, plug_per_gib: 0.1, prepare_per_gib: 0.2 };
        let (small, large) = (costs.forecast(350 * GIB).unwrap(), costs.forecast(2048 * GIB).unwrap());
        assert!((small.fast - large.fast).abs() < 1e-9);
        assert!(large.slow > 600.0 && small.fast_full < small.slow);
    }
}
