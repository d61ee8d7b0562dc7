// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The constants and structures of `opencl.api` are those of the OpenCL headers: a C compiler compares each.

mod rig;

use rig::{folder, run};
use std::fmt::Write;
use std::process::Command;
use tombolo_accel_gen::api::{Api, Param};
use tombolo_accel_gen::parse::parse;
use tombolo_accel_spec::OPENCL_API;

/// An extension's constant, which older headers don't have.
fn is_extension(name: &str) -> bool {
    ["_KHR", "_NV"].iter().any(|end| name.ends_with(end))
}

fn constants(out: &mut String, api: &Api) -> std::fmt::Result {
    let prefix = api.prefix.to_uppercase();
    for c in &api.constants {
        let name = format!("{prefix}_{}", c.name);
        let assertion = format!("_Static_assert({name} == {}, \"{name}\");", c.value);
        match is_extension(&c.name) {
            true => writeln!(out, "#ifdef {name}\n{assertion}\n#endif")?,
            false => writeln!(out, "{assertion}")?,
        }
    }
    Ok(())
}

fn structures(out: &mut String, api: &Api) -> std::fmt::Result {
    for s in &api.structs {
        let name = format!("{}_{}", api.prefix, s.name);
        writeln!(out, "_Static_assert(sizeof({name}) == {}, \"{name}\");", s.size)?;
        let mut end = "0".to_string();
        for Param { name: field, .. } in &s.fields {
            // In the order of the declaration, and nothing but padding between.
            writeln!(
                out,
                "_Static_assert(offsetof({name}, {field}) >= {end} && offsetof({name}, {field}) - ({end}) < 8, \"{field}\");"
            )?;
            end = format!("offsetof({name}, {field}) + sizeof((({name} *)0)->{field})");
        }
    }
    Ok(())
}

#[test]
fn every_constant_and_structure_is_that_of_the_headers() {
    let api = parse(OPENCL_API).expect("the declarations");
    let mut source = "#define CL_TARGET_OPENCL_VERSION 300\n#include <CL/cl.h>\n#include <CL/cl_ext.h>\n#include <stddef.h>\n".to_string();
    constants(&mut source, &api)
        .and_then(|()| structures(&mut source, &api))
        .expect("a string takes everything");
    assert!(api.constants.len() > 150 && api.structs.len() == 3, "the declarations have constants");
    let file = folder().join(format!("headers-{}.c", std::process::id()));
    std::fs::write(&file, source).expect("written");
    run(Command::new("cc").args(["-fsyntax-only", "-Wno-deprecated-declarations"]).arg(&file));
    std::fs::remove_file(&file).expect("removed");
}
