// SPDX-License-Identifier: Apache-2.0 OR MIT
use super::*;
use crate::fake::Tree;

const DEVICE: &str = "0000:01:00.0";

/// A server whose network card a process has open.
fn server(smaps: &str) -> Tree {
    let tree = Tree::server();
    tree.write("proc/70/smaps", smaps);
    tree.link("proc/70/fd/9", "/dev/vfio/1");
    tree.link("proc/80/fd/9", "/dev/vfio/2");
    tree
}

fn look(tree: &Tree) -> Mappings {
    of_device(&tree.host(), DEVICE.parse().unwrap()).unwrap()
}

fn smaps(size: u64, fields: &[(&str, u64)]) -> String {
    let fields: String = fields.iter().map(|(name, kib)| format!("{name}: {kib} kB\n")).collect();
    format!(
        "7f0000000000-7f0040000000 rw-s 0 00:01 5 /memfd\nSize: {size} kB\n{fields}THPeligible: 0\nVmFlags: rd wr\n"
    )
}

fn intel(tree: &Tree, cap: &str) {
    tree.write(&format!("sys/devices/pci0000:00/{DEVICE}/iommu/intel-iommu/cap"), &format!("{cap}\n"));
}

fn pages(list: &[(u64, u64)]) -> Vec<Pages> {
    list.iter().map(|(size, count)| Pages { size: *size, count: *count }).collect()
}

/// Capabilities of an IOMMU with pages of 2 MiB, and of one with those of 1 GiB too.
const HUGE: &str = "400000000";
const GIGANTIC: &str = "c00000000";

#[test]
fn a_device_that_no_vm_has_has_no_mappings() {
    assert_eq!(of_device(&Tree::server().host(), DEVICE.parse().unwrap()), None);
}

#[test]
fn the_tables_of_an_intel_iommu_are_counted_by_size() {
    // In the format of drivers/iommu/intel/debugfs.c (dump_page_info): a page of 1 GiB, two of 2 MiB and one of 4 KiB.
    let table = "Device 0000:01:00.0 @0x10d4d5000\n\
        IOVA_PFN\t\tPML5E\t\t\tPML4E\t\t\tPDPE\t\t\tPDE\t\t\tPTE\n\
        0x0000000000000 |\t0x0000000000000000\t0x000000010d4d6003\t0x000000010d4d7003\t0x000000010d4d8003\t0x0000000112345003\n\
        0x0000000000200 |\t0x0000000000000000\t0x000000010d4d6003\t0x000000010d4d7003\t0x0000000112400083\n\
        0x0000000000400 |\t0x0000000000000000\t0x000000010d4d6003\t0x000000010d4d7003\t0x0000000112600083\n\
        0x0000000040000 |\t0x0000000000000000\t0x000000010d4d6003\t0x0000000140000083\n";
    let other = table.replace(DEVICE, "0000:02:00.0");
    let gib = smaps(1 << 20, &[("KernelPageSize", 1 << 20), ("Shared_Hugetlb", 1 << 20)]);
    for (path, text) in [
        (format!("{DEVICE}/domain_translation_struct"), table.to_owned()),
        // Before 6.7.
        ("domain_translation_struct".into(), format!("{other}\n{table}\n{other}")),
    ] {
        let tree = server(&gib);
        intel(&tree, GIGANTIC);
        tree.write(&format!("sys/kernel/debug/iommu/intel/{path}"), &text);
        let seen = look(&tree);
        assert_eq!(seen.pages, pages(&[(GIB1, 1), (MIB2, 2), (KIB4, 1)]), "{path}");
        assert_eq!((seen.source, seen.count()), (Some(Source::Tables), 4));
        assert!(seen.why[0].contains("guests' memory has holes"), "{seen}");
        let text = seen.to_string();
        assert!(
            text.starts_with(
                "4 IOMMU pages by the IOMMU's tables: 1 of 1 GiB, 2 of 2 MiB, 1 of 4 KiB; parts"
            ),
            "{text}"
        );
    }
}

#[test]
fn without_tables_the_memory_behind_tells_the_pages_and_why_they_are_not_larger() {
    let ordinary = smaps(1 << 20, &[("Rss", 512 << 10), ("AnonHugePages", 256 << 10)]);
    let huge = smaps(1 << 20, &[("Rss", 1 << 20), ("AnonHugePages", 1 << 20)]);
    let reserved = smaps(1 << 20, &[("KernelPageSize", 1 << 20), ("Private_Hugetlb", 1 << 20)]);
    let small = smaps(8 << 10, &[("Rss", 8 << 10)]);
    type Case<'a> = (String, Option<&'a str>, &'a [(u64, u64)], Option<&'a str>);
    let cases: [Case<'_>; 6] = [
        (
            ordinary,
            None,
            &[(MIB2, 128), (KIB4, 65_536)],
            Some("256 MiB of the VM's memory are ordinary pages"),
        ),
        (huge.clone(), Some(GIGANTIC), &[(MIB2, 512)], Some("no page of 1 GiB")),
        (huge + &small, Some("0"), &[(KIB4, 262_144)], Some("no pages larger than 4 KiB")),
        (reserved.clone(), None, &[(GIB1, 1)], None),
        (reserved.clone(), Some(GIGANTIC), &[(GIB1, 1)], None),
        (reserved, Some(HUGE), &[(MIB2, 512)], Some("the IOMMU has no pages larger than 2 MiB")),
    ];
    for (smaps, cap, expected, why) in cases {
        let tree = server(&smaps);
        if let Some(cap) = cap {
            intel(&tree, cap);
        }
        let seen = look(&tree);
        assert_eq!((&seen.pages, seen.source), (&pages(expected), Some(Source::Memory)), "{seen}");
        match why {
            Some(why) => assert!(seen.why.iter().any(|said| said.contains(why)), "{why} is not in {seen}"),
            None => assert_eq!(seen.why, Vec::<String>::new()),
        }
    }
}

#[test]
fn what_can_not_be_read_can_not_be_said() {
    let tree = server("");
    std::fs::remove_file(tree.path().join("proc/70/smaps")).unwrap();
    let seen = look(&tree);
    assert_eq!((seen.source, seen.count()), (None, 0));
    assert!(seen.to_string().starts_with("IOMMU pages can't be said: the IOMMU shows no tables"), "{seen}");
}
