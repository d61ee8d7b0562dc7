// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory that exists at start, and the blocks and steps in which the rest arrives.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// One MiB in bytes.
pub const MIB: u64 = 1 << 20;
/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;

/// Linux on x86-64 adds memory in sections of this size; smaller pieces work only through sub-blocks.
pub const SECTION: u64 = 128 * MIB;
/// Boot memory when it is not set: this part of all, within these bounds. The map of all the memory takes half of that; of what the bound above
/// leaves out, the map comes into memory that arrived before.
const BOOT_SHARE: u64 = 32;
const BOOT: (u64, u64) = (512 * MIB, 8 * GIB);
/// The smallest block worth a mapping of its own.
const SMALLEST_BLOCK: u64 = 16 * MIB;
/// Steps, smallest and largest.
const STEP: (u64, u64) = (SECTION, 8 * GIB);
/// Mappings left to everything that is not grown memory: boot memory, option ROMs, BARs, zones.
const OTHER_MAPPINGS: u64 = 256;
/// A guest keeps 64 bytes of description for each page of 4096.
const MEMORY_MAP_SHARE: u64 = 64;

/// The DMA mappings that VFIO allows by default (Linux `drivers/vfio/vfio_iommu_type1.c`, `dma_entry_limit`).
pub const DEFAULT_DMA_ENTRIES: u64 = 65_535;

/// The wanted memory of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wish {
    /// All of its memory in the end, in bytes.
    pub total: u64,
    /// Its memory at start in bytes, where it is set.
    pub boot: Option<u64>,
    /// DMA mappings that VFIO allows a container.
    pub dma_entries: u64,
}

/// The parts in which memory arrives. `boot + grown` is all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Bytes at start.
    pub boot: u64,
    /// Bytes of virtio-mem; 0: there is nothing to grow.
    pub grown: u64,
    /// virtio-mem's block size in bytes, a power of two.
    pub block: u64,
    /// The most that is offered to the guest at a time, in bytes, a multiple of the block size.
    pub step: u64,
}

/// A wish that cannot be laid out.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum LayoutError {
    /// Not a whole number of large pages.
    #[error("{0} bytes of memory are no multiple of 2 MiB: round it")]
    Odd(u64),
    /// More at start than in all.
    #[error(
        "boot memory of {boot} MiB is more than the VM's {total} MiB: lower it (boot-memory), or leave it out"
    )]
    BootTooLarge {
        /// MiB asked for at start.
        boot: u64,
        /// MiB in all.
        total: u64,
    },
    /// The guest's map of all its memory would not fit.
    #[error("{boot} MiB at start cannot hold a guest kernel: give it at least {least} MiB (boot-memory)")]
    BootTooSmall {
        /// MiB asked for at start.
        boot: u64,
        /// MiB that a guest kernel needs for that map and for itself.
        least: u64,
    },
    /// No block size keeps within the limit.
    #[error(
        "VFIO allows {0} DMA mappings here, too few for any memory beside the boot memory: raise dma_entry_limit of the module \
         vfio_iommu_type1"
    )]
    TooFewMappings(u64),
}

const LEAST_BOOT: u64 = 128 * MIB;

impl Wish {
    /// Lays the memory out.
    pub fn layout(&self) -> Result<Layout, LayoutError> {
        let total = self.total;
        if total == 0 || total % (2 * MIB) != 0 {
            return Err(LayoutError::Odd(total));
        }
        if let Some(boot) = self.boot {
            if boot > total {
                return Err(LayoutError::BootTooLarge { boot: boot / MIB, total: total / MIB });
            }
            if boot < LEAST_BOOT {
                return Err(LayoutError::BootTooSmall { boot: boot / MIB, least: LEAST_BOOT / MIB });
            }
        }
        let wanted = self.boot.unwrap_or((total / BOOT_SHARE).clamp(BOOT.0, BOOT.1)).min(total);
        let block = self.block(total - wanted)?;
        // Whole sections are grown; what is left over comes at start.
        let piece = block.max(SECTION);
        let mut grown = (total - wanted) / piece * piece;
        // Both are found by their size: it must differ.
        if grown * 2 == total {
            grown -= piece;
        }
        let boot = total - grown;
        Ok(Layout { boot, grown, block, step: step(boot, grown, block) })
    }

    /// The smallest block with which `grown` bytes take at most three quarters of the mappings.
    fn block(&self, grown: u64) -> Result<u64, LayoutError> {
        let mappings = (self.dma_entries / 4 * 3).saturating_sub(OTHER_MAPPINGS);
        if mappings == 0 {
            return Err(LayoutError::TooFewMappings(self.dma_entries));
        }
        Ok(grown.div_ceil(mappings).next_power_of_two().max(SMALLEST_BLOCK))
    }
}

/// The largest step for a guest with `boot` bytes at start: the map of what it brings must fit into that with plenty of room.
pub fn step(boot: u64, grown: u64, block: u64) -> u64 {
    let affordable = boot / 8 * MEMORY_MAP_SHARE;
    (grown / 16).clamp(STEP.0, STEP.1).min(affordable).max(block) / block * block
}

impl Layout {
    /// Everything at start, as without this crate.
    pub fn slow(total: u64) -> Self {
        Self { boot: total, grown: 0, block: SMALLEST_BLOCK, step: SMALLEST_BLOCK }
    }

    /// DMA mappings that the grown memory takes.
    pub fn mappings(&self) -> u64 {
        self.grown / self.block
    }

    /// QEMU's arguments for the memory, with the virtio-mem device named `id`, its backing memory `{id}-memory`. `node` is the host
    /// node that the memory is bound to.
    pub fn arguments(&self, id: &str, node: Option<u32>) -> Vec<String> {
        let mut arguments = vec!["-m".to_owned()];
        if self.grown == 0 {
            arguments.push(format!("{}M", self.boot / MIB));
            return arguments;
        }
        arguments.push(format!("{}M,slots=1,maxmem={}M", self.boot / MIB, (self.boot + self.grown) / MIB));
        let bound = node.map_or(String::new(), |node| format!(",host-nodes={node},policy=bind"));
        let size = self.grown;
        arguments.extend([
            "-object".to_owned(),
            format!("memory-backend-ram,id={id}-memory,size={size},reserve=off{bound}"),
            "-device".to_owned(),
            format!("virtio-mem-pci,id={id},memdev={id}-memory,block-size={},requested-size=0", self.block),
        ]);
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout(total: u64) -> Layout {
        Wish { total, boot: None, dma_entries: DEFAULT_DMA_ENTRIES }.layout().unwrap()
    }

    #[test]
    fn a_small_vm_has_everything_at_start() {
        assert_eq!(layout(512 * MIB).grown, 0);
        assert_eq!(layout(512 * MIB).arguments("m", None), ["-m", "512M"]);
    }

    #[test]
    fn boot_memory_is_a_thirty_second_part_from_512_mib_to_eight_gib() {
        assert_eq!(layout(4 * GIB).boot, 512 * MIB);
        assert_eq!(layout(14 * GIB).boot, 512 * MIB);
        assert_eq!(layout(64 * GIB).boot, 2 * GIB);
        assert_eq!(layout(350 * GIB).boot, 8 * GIB);
        assert_eq!(layout(2048 * GIB).boot, 8 * GIB);
    }

    #[test]
    fn the_map_of_a_step_takes_at_most_an_eighth_of_the_boot_memory() {
        for gib in [1, 4, 14, 64, 256, 350, 2048, 16384] {
            let layout = layout(gib * GIB);
            assert!(layout.step / MEMORY_MAP_SHARE <= layout.boot / 8, "{gib} GiB: {layout:?}");
        }
    }

    #[test]
    fn blocks_grow_with_the_memory_so_that_the_mappings_fit() {
        assert_eq!(layout(350 * GIB).block, 16 * MIB);
        assert_eq!(layout(2048 * GIB).block, 64 * MIB);
        let tight = Wish { total: 350 * GIB, boot: None, dma_entries: 1024 }.layout().unwrap();
        assert!(tight.mappings() <= 512 && tight.block.is_power_of_two());
    }

    #[test]
    fn what_cannot_be_laid_out_names_the_setting_to_change() {
        let wish = Wish { total: GIB, boot: Some(2 * GIB), dma_entries: DEFAULT_DMA_ENTRIES };
        assert!(wish.layout().unwrap_err().to_string().contains("boot-memory"));
        let wish = Wish { boot: Some(64 * MIB), ..wish };
        assert!(matches!(wish.layout(), Err(LayoutError::BootTooSmall { .. })));
        let wish = Wish { boot: None, dma_entries: 100, ..wish };
        assert!(wish.layout().unwrap_err().to_string().contains("dma_entry_limit"));
        assert!(matches!(Wish { total: 1, ..wish }.layout(), Err(LayoutError::Odd(1))));
    }

    #[test]
    fn the_memory_is_bound_to_its_node() {
        let arguments = layout(4 * GIB).arguments("mem0", Some(1)).join(" ");
        assert!(
            arguments.contains("maxmem=4096M") && arguments.contains("host-nodes=1,policy=bind"),
            "{arguments}"
        );
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_every_part_is_aligned(
            pages in 64_u64..8 * 1024 * 1024, boot in proptest::option::of(64_u64..16384), entries in 1024_u64..1_000_000,
        ) {
            let wish = Wish { total: pages * 2 * MIB, boot: boot.map(|b| b * 2 * MIB), dma_entries: entries };
            if let Ok(layout) = wish.layout() {
                prop_assert_eq!(layout.boot + layout.grown, wish.total);
                prop_assert_ne!(layout.boot, layout.grown);
                prop_assert!(layout.block.is_power_of_two());
                prop_assert_eq!(layout.grown % layout.block, 0);
                prop_assert_eq!(layout.grown % SECTION, 0);
                prop_assert!(layout.step > 0 && layout.step % layout.block == 0);
                prop_assert!(layout.mappings() + OTHER_MAPPINGS <= entries);
            }
        }
    }
}
