// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prints the documentation table of a file of declarations: `tombolo-accel-gen accel/spec/opencl.api`.

fn main() -> Result<(), String> {
    let path = std::env::args().nth(1).ok_or("usage: tombolo-accel-gen FILE.api")?;
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let api = tombolo_accel_gen::parse::parse(&text).map_err(|e| format!("{path}: {e}"))?;
    print!("{}", tombolo_accel_gen::doc::emit(&api));
    Ok(())
}
