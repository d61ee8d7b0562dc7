// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs.

use super::notify::{on_program, once};
use super::{Done, value};
use crate::opencl::{Cx, include, lock};
use std::ffi::{CString, c_void};
use std::io::Write;
use std::ptr::{null, null_mut};
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_calls::say;

pub(crate) fn create_program_with_source(cx: &mut Cx<'_>, r: &wire::CreateProgramWithSource<'_>) -> Done {
    let f = native!(cx, clCreateProgramWithSource);
    let context = cx.get(kind::CONTEXT, r.context)?;
    cx.cl.output.expect_of(r.source);
    // A length of 0 says that the string ends with a zero, so it gets one.
    let source = [r.source, b"\0"].concat();
    let (text, len) = (source.as_ptr(), r.source.len());
    cx.create(kind::PROGRAM, r.new, |code| {
        // SAFETY: one string of this length, and a zero behind it.
        unsafe { f(context, 1, (&raw const text).cast(), (&raw const len).cast(), code) }
    })
}

pub(crate) fn create_program_with_binary(cx: &mut Cx<'_>, r: &wire::CreateProgramWithBinary<'_>) -> Done {
    let f = native!(cx, clCreateProgramWithBinary);
    cx.cl.output.expect();
    let context = cx.get(kind::CONTEXT, r.context)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let mut rest = r.binaries;
    let mut starts = Vec::new();
    for len in r.lengths.iter() {
        let len = usize::try_from(*len).map_err(|_| cl::INVALID_VALUE)?;
        let (one, more) = rest.split_at_checked(len).ok_or(cl::INVALID_VALUE)?;
        starts.push(one.as_ptr());
        rest = more;
    }
    if starts.len() != devices.len() {
        return Err(cl::INVALID_VALUE);
    }
    let mut states = vec![tombolo_accel_spec::UNWRITTEN; devices.len()];
    let outcome = cx.create(kind::PROGRAM, r.new, |code| {
        let (n, lengths) = (devices.len() as u32, r.lengths.as_ptr().cast());
        // SAFETY: lists as long as said; each binary lies in the record.
        unsafe {
            f(context, n, devices.as_ptr(), lengths, starts.as_ptr().cast(), states.as_mut_ptr().cast(), code)
        }
    });
    cx.reply().i32s(&states);
    outcome
}

pub(crate) fn create_program_with_built_in_kernels(
    cx: &mut Cx<'_>,
    r: &wire::CreateProgramWithBuiltInKernels<'_>,
) -> Done {
    let f = native!(cx, clCreateProgramWithBuiltInKernels);
    cx.cl.output.expect();
    let context = cx.get(kind::CONTEXT, r.context)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let names = cx.c_string(r.names)?;
    cx.create(kind::PROGRAM, r.new, |code| {
        // SAFETY: lists as long as said; a C string.
        unsafe { f(context, devices.len() as u32, devices.as_ptr(), names.as_ptr(), code) }
    })
}

pub(crate) fn create_program_with_il(cx: &mut Cx<'_>, r: &wire::CreateProgramWithIL<'_>) -> Done {
    let f = native!(cx, clCreateProgramWithIL);
    cx.cl.output.expect();
    let context = cx.get(kind::CONTEXT, r.context)?;
    cx.create(kind::PROGRAM, r.new, |code| {
        // SAFETY: bytes of this length.
        unsafe { f(context, r.il.as_ptr().cast(), r.il.len(), code) }
    })
}

pub(super) fn optional(cx: &Cx<'_>, text: Option<&[u8]>) -> Result<Option<CString>, i32> {
    text.map(|t| cx.c_string(t)).transpose()
}

/// The driver is always asked to know the parameters of kernels ([`super::kernel`]).
const ARGUMENTS: &[u8] = b"-cl-kernel-arg-info";

/// Bytes of a compiler's files for a small kernel.
const ROOM: usize = 64 << 10;

/// The server's own state of a built program.
#[derive(Clone, Copy, Debug, Default)]
pub struct Built {
    /// Kernels tell of their arguments: the client asked for it, or gave no options at all (where drivers don't ask for the option).
    pub tells_arguments: bool,
    /// The server added [`ARGUMENTS`] behind the client's options.
    added: bool,
}

/// A program's options, with the folders of the files that came along before its own.
fn building(
    cx: &mut Cx<'_>,
    program: u64,
    options: Option<&[u8]>,
    (folders, files, texts): (&[u32], &[&[u8]], &[&[u8]]),
) -> Result<CString, i32> {
    // A worker's own folder (worker.rs).
    let mut all = include::keep(&std::env::temp_dir(), folders, files, texts)?.into_bytes();
    let own = options.unwrap_or_default();
    all.extend_from_slice(own);
    texts.iter().for_each(|text| cx.cl.output.expect_of(text));
    cx.cl.output.expect_of(own);
    let asked = own.split(u8::is_ascii_whitespace).any(|option| option == ARGUMENTS);
    if !asked {
        if !all.is_empty() {
            all.push(b' ');
        }
        all.extend_from_slice(ARGUMENTS);
    }
    if let Ok(extra) = lock(&cx.cl.table).extra_mut(kind::PROGRAM, program) {
        extra.program = Built { tells_arguments: asked || options.is_none(), added: !asked };
    }
    cx.c_string(&all)
}

/// Of a build's options, those that the server added are left out.
pub(crate) fn get_program_build_info(cx: &mut Cx<'_>, r: &wire::GetProgramBuildInfo) -> Done {
    let f = native!(cx, clGetProgramBuildInfo);
    let (program, device) = (cx.get(kind::PROGRAM, r.program)?, cx.get(kind::DEVICE, r.device)?);
    // SAFETY: live handles; buffers are as long as said.
    cx.info(r.param, &[], |size, value, ret| unsafe { f(program, device, r.param, size, value, ret) })?;
    if r.param == cl::PROGRAM_BUILD_OPTIONS {
        let added = cx.extra(kind::PROGRAM, r.program, |e| e.program.added)?;
        let text = cx.reply.strip_suffix(b"\0").and_then(|text| text.strip_suffix(ARGUMENTS));
        if let (Some(text), true) = (text, added) {
            let own = text.strip_suffix(b" ").unwrap_or(text).len();
            cx.reply.truncate(own);
            cx.reply.push(0);
        }
    }
    Ok(())
}

fn program_notify(cx: &Cx<'_>, number: u64) -> (*const c_void, *mut c_void) {
    if number == 0 { (null(), null_mut()) } else { (on_program as *const c_void, once(cx, number)) }
}

pub(super) fn pointer_or_null<T>(list: &[T]) -> *const T {
    if list.is_empty() { null() } else { list.as_ptr() }
}

/// Says so where a compiler that failed had no room for its files: drivers answer what they answer for a wrong program then, without a word.
fn explained(outcome: Done) -> Done {
    let folder = std::env::temp_dir();
    let room = || tempfile::tempfile_in(&folder).and_then(|mut file| file.write_all(&[1; ROOM]));
    if let (Err(_), Err(e)) = (outcome, room()) {
        say!(
            "tombolo accel: a program was not built, and its compiler has no room for files in {}: {e}; make room there, or choose another folder (TMPDIR)",
            folder.display()
        );
    }
    outcome
}

pub(crate) fn build_program(cx: &mut Cx<'_>, r: &wire::BuildProgram<'_>) -> Done {
    let f = native!(cx, clBuildProgram);
    let program = cx.get(kind::PROGRAM, r.program)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let options = building(cx, r.program, r.options, (&r.folders, &r.files, &r.texts))?;
    let (notify, user) = program_notify(cx, r.notify);
    cx.may_block()?;
    let text = options.as_ptr();
    // SAFETY: lists as long as said; a C string; the callback's data is freed by the callback.
    let built = unsafe { f(program, devices.len() as u32, pointer_or_null(&devices), text, notify, user) };
    explained(cx.status(built))
}

pub(crate) fn compile_program(cx: &mut Cx<'_>, r: &wire::CompileProgram<'_>) -> Done {
    let f = native!(cx, clCompileProgram);
    let program = cx.get(kind::PROGRAM, r.program)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let headers = cx.all(kind::PROGRAM, &r.headers)?;
    let options = building(cx, r.program, r.options, (&r.folders, &r.files, &r.texts))?;
    let names = r.names.iter().map(|n| cx.c_string(n)).collect::<Result<Vec<_>, _>>()?;
    if names.len() != headers.len() {
        return Err(cl::INVALID_VALUE);
    }
    let names: Vec<_> = names.iter().map(|n| n.as_ptr()).collect();
    let (notify, user) = program_notify(cx, r.notify);
    cx.may_block()?;
    let text = options.as_ptr();
    // SAFETY: as above.
    let compiled = unsafe {
        f(
            program,
            devices.len() as u32,
            pointer_or_null(&devices),
            text,
            headers.len() as u32,
            pointer_or_null(&headers),
            pointer_or_null(&names).cast(),
            notify,
            user,
        )
    };
    explained(cx.status(compiled))
}

pub(crate) fn link_program(cx: &mut Cx<'_>, r: &wire::LinkProgram<'_>) -> Done {
    let f = native!(cx, clLinkProgram);
    let context = cx.get(kind::CONTEXT, r.context)?;
    let devices = cx.all(kind::DEVICE, &r.devices)?;
    let programs = cx.all(kind::PROGRAM, &r.programs)?;
    let options = optional(cx, r.options)?;
    let (notify, user) = program_notify(cx, r.notify);
    cx.may_block()?;
    let text = options.as_ref().map_or(null(), |o| o.as_ptr());
    cx.create(kind::PROGRAM, r.new, |code| {
        // SAFETY: as above.
        unsafe {
            f(
                context,
                devices.len() as u32,
                pointer_or_null(&devices),
                text,
                programs.len() as u32,
                pointer_or_null(&programs),
                notify,
                user,
                code,
            )
        }
    })
}

pub(crate) fn program_binaries(cx: &mut Cx<'_>, r: &wire::ProgramBinaries) -> Done {
    let f = native!(cx, clGetProgramInfo);
    let program = cx.get(kind::PROGRAM, r.program)?;
    let asked = cl::PROGRAM_BINARY_SIZES;
    // SAFETY: live handles that were looked up; buffers and lists are as long as said.
    let (status, sizes) = value(&|s, v, ret| unsafe { f(program, asked, s, v, ret) });
    cx.status(status)?;
    let sizes: Vec<usize> =
        sizes.chunks_exact(8).filter_map(|c| c.first_chunk().map(|c| usize::from_le_bytes(*c))).collect();
    if sizes.iter().sum::<usize>() > 256 << 20 {
        return Err(cl::OUT_OF_RESOURCES);
    }
    let mut binaries: Vec<Vec<u8>> = sizes.iter().map(|s| vec![0; *s]).collect();
    let pointers: Vec<*mut u8> = binaries.iter_mut().map(|b| b.as_mut_ptr()).collect();
    let (size, to) = (size_of_val(&pointers[..]), pointers.as_ptr().cast_mut().cast());
    // SAFETY: one pointer for each device, each with room for its binary.
    cx.status(unsafe { f(program, cl::PROGRAM_BINARIES, size, to, null_mut()) })?;
    let binaries: Vec<&[u8]> = binaries.iter().map(Vec::as_slice).collect();
    cx.reply().strs(&binaries);
    Ok(())
}
