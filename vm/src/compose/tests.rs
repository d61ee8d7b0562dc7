// SPDX-License-Identifier: Apache-2.0 OR MIT
use tombolo_topology::request::Part;

use super::*;

fn parse(text: &str) -> Result<Project, ComposeError> {
    Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text)
}

fn error(text: &str) -> String {
    parse(text).expect_err("must be refused").to_string()
}

#[test]
fn a_small_file_gets_the_defaults() {
    let p = parse("[zone.shared]\nsize = \"512M\"\nfiles = true\n[vm.a]\nzones = { shared = { mount = \"/mnt\" } }\n[vm.b]\n").unwrap();
    assert_eq!(p.name, "demo");
    assert_eq!(p.compose.zone["shared"].size, Size(512 << 20));
    assert_eq!(p.compose.zone["shared"].backing, Backing::Memfd);
    let a = &p.compose.vm["a"];
    assert_eq!((a.cpus, a.memory, &a.ready), (2, Size(512 << 20), &Ready::Agent));
    assert_eq!(a.zones["shared"].mount.as_deref(), Some("/mnt"));
    assert_eq!(a.zones["shared"].rights, Rights::ReadWrite);
}

#[test]
fn an_unknown_key_is_named_with_its_line_its_table_and_the_nearest_valid_one() {
    assert_eq!(
        error("[vm.a]\ncpus = 2\nmemroy = \"1G\"\n"),
        "/somewhere/demo/tombolo.toml:3: unknown key 'memroy' in [vm.a]; did you mean 'memory'?"
    );
    let e = error("[vm.a]\ncpus = 2\n[netwrk.x]\n");
    assert!(e.starts_with("/somewhere/demo/tombolo.toml:3: unknown key 'netwrk'"), "{e}");
    let e = error("[zone.z]\nsize=\"8M\"\n[vm.a.zones]\nz = { mont = \"/x\" }\n");
    assert!(e.contains(":4: unknown key 'mont'") && e.contains("'mount'"), "{e}");
}

#[test]
fn a_name_that_is_not_allowed_is_told_with_its_line_and_what_is() {
    for header in
        ["vm.\"a b\"", "vm.'grün'", "vm.grün", "vm.a b", "vm.-a", "net.\"x]\"", "accel.\"\"", "vm . \"a.b\""]
    {
        let e = error(&format!("name = \"demo\"\n  [{header}] # one\n"));
        assert!(
            e.contains(":2: ") && e.contains("a-z, A-Z, 0-9, '-' and '_'") && !e.contains('\n'),
            "{header}: {e}"
        );
    }
    let e = error("[vm.\"a.b\"]\n");
    assert!(e.contains(":1: 'a.b' can't name a VM: write up to 31"), "{e}");
}

#[test]
fn a_value_of_the_wrong_kind_names_its_key() {
    let e = error("[vm.a]\nnetworks = 5\n");
    assert!(e.contains(":2: vm.a.networks: invalid type: integer `5`"), "{e}");
    let e = error("[vm]\na = 1\n");
    assert!(e.contains(":2: vm.a: invalid type: integer `1`"), "{e}");
    assert!(error("[vms.a]\n").contains(":1: unknown key 'vms' at the top level; did you mean 'vm'?"));
    assert!(error("[vm.a]\ncpus = \n").starts_with("/somewhere/demo/tombolo.toml:2: "));
}

#[test]
fn too_little_memory_names_key_and_line() {
    assert_eq!(
        error("[vm.a]\n\nmemory = \"16M\"\n"),
        "/somewhere/demo/tombolo.toml:3: vm.a.memory is 16M; a guest needs at least 128M"
    );
}

#[test]
fn a_limit_below_what_a_guest_is_given_is_refused() {
    assert!(
        error("[vm.a]\nmemory = \"1G\"\nmemory_limit = \"512M\"\n")
            .contains(":3: vm.a.memory_limit is 512M, less than")
    );
    assert!(error("[vm.a]\ncpu_limit = 0.0\n").contains(":2: vm.a.cpu_limit"));
    parse("[vm.a]\ncpu_limit = 1.5\nmemory_limit = \"1G\"\n").unwrap();
}

#[test]
fn a_part_of_the_host_is_named_with_what_it_excludes() {
    let p = parse("reserve = 2\n[vm.a]\ntopology = \"node:1\"\npages = \"2M\"\n").unwrap();
    assert_eq!((p.compose.reserve, p.compose.vm["a"].topology.clone()), (2, Some(Part::Node(1))));
    assert!(error("[vm.a]\ntopology = \"all\"\n").contains(":2: vm.a.topology: 'all' is no part of a host"));
    assert!(error("[vm.a]\npages = \"1G\"\n").contains(":2: vm.a.pages needs topology"));
    let e = error("[vm.a]\ntopology = \"host\"\nstart = \"fast\"\n");
    assert!(e.contains(":3: vm.a.start: memory that is bound"), "{e}");
    let e = error("[vm.a]\ntopology = \"close\"\nboot_memory = \"512M\"\n");
    assert!(
        e.contains(":3: vm.a.boot_memory: memory that is bound") && e.contains("leave out boot_memory"),
        "{e}"
    );
}

#[test]
fn a_zone_that_would_break_its_neighbours_is_refused_with_a_size_that_works() {
    assert!(error("[zone.z]\nsize = \"9M\"\n").ends_with("write \"10M\""));
    assert!(error("[zone.z]\nsize = \"1M\"\n").ends_with("write \"8M\""));
    assert!(error("[zone.z]\nsize = \"much\"\n").contains(":2: zone.z.size: 'much' is not a size"));
}

#[test]
fn an_undeclared_zone_is_named_with_the_one_that_was_meant() {
    let e = error("[zone.shared]\nsize=\"8M\"\n[vm.a]\nzones = { shraed = {} }\n");
    assert!(e.contains(":4: ") && e.ends_with("did you mean 'shared'?"), "{e}");
}

#[test]
fn a_limit_of_nothing_is_refused_since_it_would_be_none() {
    for limit in ["bytes = 0", "bytes = \"0\"", "inodes = 0"] {
        let e = error(&format!("[zone.z]\nsize=\"8M\"\n[vm.a]\nzones = {{ z = {{ {limit} }} }}\n"));
        assert!(e.contains(":4: vm.a.zones.z: bytes and inodes are 1 at least"), "{limit}: {e}");
    }
}

#[test]
fn paths_are_relative_to_the_file() {
    let p = parse("[zone.z]\nsize=\"8M\"\nbacking=\"./z.img\"\n[vm.a]\ndisk=\"a.qcow2\"\n[vm.b]\nkernel=\"k/vmlinuz\"\n[vm.c]\nkernel=\"6.1\"\n")
        .unwrap();
    assert_eq!(p.compose.vm["a"].disk.as_deref(), Some(Path::new("/somewhere/demo/a.qcow2")));
    assert_eq!(p.compose.vm["b"].kernel.as_deref(), Some("/somewhere/demo/k/vmlinuz"));
    assert_eq!(p.compose.vm["c"].kernel.as_deref(), Some("6.1"));
    assert_eq!(p.compose.zone["z"].backing, Backing::File("/somewhere/demo/./z.img".into()));
}

#[test]
fn sizes_are_written_as_they_are_read() {
    for text in ["0", "512M", "3G", "1T", "12K", "1000"] {
        assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
    }
    assert_eq!("2 GiB".parse::<Size>().unwrap(), Size(2 << 30));
    assert!("99999999T".parse::<Size>().is_err());
}

#[test]
fn a_project_survives_the_way_to_the_supervisor() {
    let p = parse("[zone.z]\nsize=\"8M\"\nbacking=\"hugetlb\"\n[vm.a]\nready=\"console:log.n:\"\nzones={z={rights=\"ro\"}}\n").unwrap();
    let json = serde_json::to_string(&p).unwrap();
    assert_eq!(serde_json::from_str::<Project>(&json).unwrap(), p);
}

#[test]
fn the_hypervisor_is_read_by_its_former_name_too() {
    for key in ["hypervisor", "accel"] {
        let p = parse(&format!("[vm.a]\n{key} = \"tcg\"\n")).unwrap();
        assert_eq!(p.compose.vm["a"].hypervisor, HypervisorChoice::Tcg);
    }
}

#[test]
fn what_needs_a_part_of_the_host_or_reserved_cpus_is_refused_without() {
    for key in ["isolate = true", "cpu_pm = true", "cpu_pm = false"] {
        let name = key.split(' ').next().unwrap();
        let e = error(&format!("[vm.a]\ncpus = 1\n{key}\n"));
        assert!(e.contains(&format!(":3: vm.a.{name} needs topology = \"close\"")), "{e}");
    }
    let e = error("[vm.a]\ntopology = \"close\"\nisolate = true\n");
    assert!(e.contains(":3: vm.a.isolate: QEMU's own threads") && e.contains("add reserve = 1"), "{e}");
    parse("reserve = 1\n[vm.a]\ntopology = \"close\"\nisolate = true\ncpu_pm = false\n").unwrap();
}
