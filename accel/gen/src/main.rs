// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prints the documentation table of a file of declarations: `tombolo-accel-gen accel/spec/opencl.api`; of an API whose functions say why they are not
//! forwarded, the rows of its page.

use tombolo_accel_gen::doc;

fn main() -> Result<(), String> {
    let path = std::env::args().nth(1).ok_or("usage: tombolo-accel-gen FILE.api")?;
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let api = tombolo_accel_gen::parse::parse(&text).map_err(|e| format!("{path}: {e}"))?;
    let doc = if api.is_contextual { doc::page(&api) } else { doc::emit(&api) };
    print!("{doc}");
    Ok(())
}
