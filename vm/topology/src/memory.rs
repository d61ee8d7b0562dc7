// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The division of a VM's memory between nodes, and its pages.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;
use crate::plan::{Ledger, PlanError};
use crate::request::{Pages, Part, Request};

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;
/// Bytes of a GiB.
pub const GIB: u64 = 1 << 30;

/// The pages of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageSize {
    /// Reserved pages of 1 GiB.
    #[serde(rename = "1G")]
    Gigantic,
    /// Reserved pages of 2 MiB.
    #[serde(rename = "2M")]
    Huge,
    /// Ordinary pages, which the kernel joins to huge ones where it can.
    Transparent,
}

impl PageSize {
    /// Bytes of a reserved page; none where nothing is reserved.
    pub fn reserved(self) -> Option<u64> {
        match self {
            PageSize::Gigantic => Some(GIB),
            PageSize::Huge => Some(2 * MIB),
            PageSize::Transparent => None,
        }
    }

    /// Memory is divided in multiples of this.
    fn unit(self) -> u64 {
        self.reserved().unwrap_or(2 * MIB)
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PageSize::Gigantic => "reserved pages of 1 GiB",
            PageSize::Huge => "reserved pages of 2 MiB",
            PageSize::Transparent => "transparent huge pages",
        })
    }
}

/// The pages that a request allows, the largest first.
fn choices(pages: Pages) -> &'static [PageSize] {
    match pages {
        Pages::Auto => &[PageSize::Gigantic, PageSize::Huge, PageSize::Transparent],
        Pages::Gigantic => &[PageSize::Gigantic],
        Pages::Huge => &[PageSize::Huge],
        Pages::Transparent => &[PageSize::Transparent],
    }
}

/// Returns whether these nodes have enough memory left for a VM, in pages of one size that it may have. Each node has to give a part of it.
pub(crate) fn fits(ledger: &Ledger<'_>, request: &Request, nodes: &[u32]) -> bool {
    choices(request.pages).iter().any(|pages| {
        let rooms = || nodes.iter().map(|node| room(ledger, *node, *pages) / pages.unit() * pages.unit());
        request.memory % pages.unit() == 0
            && rooms().all(|room| room > 0)
            && rooms().fold(0, u64::saturating_add) >= request.memory
    })
}

/// The pages of a VM's memory, and how many bytes each of `nodes` gives.
pub(crate) fn divide(
    ledger: &Ledger<'_>,
    request: &Request,
    cpus: &CpuSet,
    nodes: &[u32],
) -> Result<(PageSize, Vec<u64>), PlanError> {
    let choices = choices(request.pages);
    let weights: Vec<u64> = nodes.iter().map(|node| weight(ledger, request, cpus, *node)).collect();
    let endless = vec![u64::MAX; nodes.len()];
    for pages in choices {
        let most: Vec<u64> = nodes.iter().map(|node| room(ledger, *node, *pages)).collect();
        let Some(sizes) = split(request.memory, &weights, &most, pages.unit()) else { continue };
        // Reserved pages without a request for them must not shift memory from one node to another.
        let even = || split(request.memory, &weights, &endless, pages.unit());
        let chosen = request.pages == Pages::Auto && pages.reserved().is_some();
        if !chosen || even().as_ref() == Some(&sizes) {
            return Ok((*pages, sizes));
        }
    }
    let pages = choices.last().copied().unwrap_or(PageSize::Transparent);
    let left =
        nodes.iter().map(|node| format!("node {node} has {} MiB left", room(ledger, *node, pages) / MIB));
    Err(PlanError::MemoryShort {
        vm: request.name.clone(),
        wanted: request.memory / MIB,
        pages,
        nodes: left.collect::<Vec<_>>().join(", "),
        remedy: match pages {
            PageSize::Transparent => {
                "lower its 'memory', or give it other nodes; each node gives at least 2 MiB"
            }
            _ => {
                "reserve pages in /sys/devices/system/node/node*/hugepages, make 'memory' a multiple of the page, or set pages = \"transparent\""
            }
        },
    })
}

/// A VM has of each node's memory as much as of its CPUs; one that has the whole host, as the nodes' sizes are.
fn weight(ledger: &Ledger<'_>, request: &Request, cpus: &CpuSet, node: u32) -> u64 {
    if request.part == Part::Host {
        return ledger.host.node(node).map_or(0, |node| node.memory);
    }
    cpus.iter().filter(|cpu| ledger.node_of.get(cpu) == Some(&node)).count() as u64
}

/// Bytes that a node has left in such pages.
fn room(ledger: &Ledger<'_>, node: u32, pages: PageSize) -> u64 {
    match pages.reserved() {
        Some(size) => ledger.huge.get(&(node, size)).map_or(0, |free| free.saturating_mul(size)),
        // Memory that is reserved as huge pages counts as nothing else.
        None => {
            let huge = ledger.huge.range((node, 0)..=(node, u64::MAX));
            let reserved: u64 = huge.map(|((_, size), free)| size.saturating_mul(*free)).sum();
            ledger.memory.get(&node).map_or(0, |left| left.saturating_sub(reserved))
        }
    }
}

/// Takes what a VM got of a node.
pub(crate) fn take(ledger: &mut Ledger<'_>, node: u32, bytes: u64, pages: PageSize) {
    if let Some(left) = ledger.memory.get_mut(&node) {
        *left = left.saturating_sub(bytes);
    }
    let Some(size) = pages.reserved() else { return };
    if let Some(free) = ledger.huge.get_mut(&(node, size)) {
        *free = free.saturating_sub(bytes / size);
    }
}

/// Divides `total` by `weights` in multiples of `unit`: each part has at least one, none more than its `most`. None where that is impossible.
pub fn split(total: u64, weights: &[u64], most: &[u64], unit: u64) -> Option<Vec<u64>> {
    let units = total / unit;
    let sum: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let rooms: Vec<u64> = most.iter().map(|bytes| bytes / unit).collect();
    let all: u128 = rooms.iter().map(|room| u128::from(*room)).sum();
    if total % unit != 0
        || sum == 0
        || rooms.contains(&0)
        || units < weights.len() as u64
        || all < u128::from(units)
    {
        return None;
    }
    let fair = |weight: u64| u64::try_from(u128::from(units) * u128::from(weight) / sum).unwrap_or(units);
    let mut parts: Vec<u64> =
        weights.iter().zip(&rooms).map(|(weight, room)| fair(*weight).clamp(1, *room)).collect();
    let mut given: u64 = parts.iter().sum();
    while given > units {
        // Parts that were raised to one unit; the largest gives.
        let largest = parts.iter_mut().max()?;
        *largest -= 1;
        given -= 1;
    }
    while given < units {
        let open: Vec<usize> = (0..parts.len()).filter(|at| parts[*at] < rooms[*at]).collect();
        let each = (units - given).div_ceil(open.len() as u64);
        for at in open {
            let more = each.min(rooms[at] - parts[at]).min(units - given);
            parts[at] += more;
            given += more;
        }
    }
    Some(parts.into_iter().map(|part| part * unit).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn memory_is_divided_by_weight_as_far_as_there_is_room() {
        assert_eq!(split(8, &[1, 1], &[100, 100], 2), Some(vec![4, 4]));
        assert_eq!(split(8, &[3, 1], &[100, 100], 2), Some(vec![6, 2]));
        assert_eq!(split(8, &[1, 1], &[2, 100], 2), Some(vec![2, 6]));
        assert_eq!(split(8, &[1, 1000], &[100, 100], 2), Some(vec![2, 6]));
        assert_eq!(split(8, &[1, 1], &[2, 4], 2), None);
        assert_eq!(split(7, &[1], &[100], 2), None);
        assert_eq!(split(2, &[1, 1], &[100, 100], 2), None);
    }

    proptest! {
        #[test]
        fn parts_are_all_of_the_total_and_fit(
            total in 1_u64..10_000,
            parts in prop::collection::vec((1_u64..1000, 0_u64..5_000), 1..17),
            unit in 1_u64..10,
        ) {
            let (weights, most): (Vec<u64>, Vec<u64>) = parts.into_iter().unzip();
            match split(total, &weights, &most, unit) {
                Some(parts) => {
                    prop_assert_eq!(parts.iter().sum::<u64>(), total);
                    for (part, most) in parts.iter().zip(&most) {
                        prop_assert!(part <= most && part % unit == 0 && *part > 0);
                    }
                }
                None => prop_assert!(
                    total % unit != 0
                        || total / unit < weights.len() as u64
                        || most.iter().any(|most| *most < unit)
                        || most.iter().map(|most| most / unit).sum::<u64>() < total / unit
                ),
            }
        }
    }
}
