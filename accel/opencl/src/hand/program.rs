// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs.

use crate::rt::{self, Handle, Id, Obj};
use crate::state::{As, Body, Program};
use std::ffi::{c_char, c_void};
use std::sync::Mutex;
use tombolo_accel_client::include;
use tombolo_accel_spec::UNWRITTEN;
use tombolo_accel_spec::opencl::{self as wire, cl, kind};
use tombolo_accel_spec::wire::Decoder;

type ProgramNotify = Option<unsafe extern "C" fn(Handle, *mut c_void)>;

fn program(context: Obj, devices: Option<&[Obj]>, source: Vec<u8>) -> Result<rt::New, i32> {
    let devices = match devices {
        Some(some) => some.iter().map(|d| rt::hold(*d)).collect(),
        None => context.context()?.devices.iter().map(|d| rt::hold(d.obj())).collect(),
    };
    rt::new_object(
        kind::PROGRAM,
        Body::Program(Program { context: rt::hold(context), devices, source, options: Mutex::default() }),
    )
}

/// One of several byte strings; a length of 0 means 'up to the NUL'.
unsafe fn piece<'a>(strings: *const *const u8, lengths: *const usize, i: usize) -> Result<&'a [u8], i32> {
    // SAFETY: arrays as the API says.
    unsafe {
        let start = *strings.add(i);
        if start.is_null() {
            return Err(cl::INVALID_VALUE);
        }
        match if lengths.is_null() { 0 } else { *lengths.add(i) } {
            0 => rt::string(start.cast()),
            len => Ok(std::slice::from_raw_parts(start, len)),
        }
    }
}

/// Refuses more bytes than a request may carry. A request that is longer than a record goes in parts.
fn too_long(bytes: &[u8]) -> Result<(), i32> {
    if bytes.len() > 60 << 20 { Err(cl::OUT_OF_HOST_MEMORY) } else { Ok(()) }
}

pub unsafe extern "C" fn clCreateProgramWithSource(
    context: Handle,
    count: u32,
    strings: *const *const u8,
    lengths: *const usize,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let context = rt::object(context, kind::CONTEXT)?;
            if count == 0 || strings.is_null() {
                return Err(cl::INVALID_VALUE);
            }
            let mut source = Vec::new();
            for i in 0..count as usize {
                source.extend_from_slice(piece(strings, lengths, i)?);
            }
            too_long(&source)?;
            let including = source.windows(7).any(|w| w == b"include");
            let kept = if including { source.clone() } else { Vec::new() };
            let new = program(context, None, kept)?;
            rt::call(&wire::CreateProgramWithSource {
                context: context.id(),
                source: &source,
                new: new.id(),
            })?;
            Ok(new.publish())
        })
    }
}

pub unsafe extern "C" fn clCreateProgramWithBinary(
    context: Handle,
    n: u32,
    devices: *const Handle,
    lengths: *const usize,
    binaries: *const *const u8,
    binary_status: *mut i32,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let context = rt::object(context, kind::CONTEXT)?;
            let devices = rt::list(n, devices, kind::DEVICE)?;
            if lengths.is_null() || binaries.is_null() {
                return Err(cl::INVALID_VALUE);
            }
            let (mut all, mut sizes) = (Vec::new(), Vec::new());
            for i in 0..devices.len() {
                let (len, start) = (*lengths.add(i), *binaries.add(i));
                if len == 0 || start.is_null() {
                    return Err(cl::INVALID_VALUE);
                }
                all.extend_from_slice(std::slice::from_raw_parts(start, len));
                sizes.push(len as u64);
            }
            too_long(&all)?;
            let new = program(context, Some(&devices), Vec::new())?;
            let record = wire::CreateProgramWithBinary {
                context: context.id(),
                devices: devices.iter().map(|d| d.id()).collect::<Vec<_>>().into(),
                lengths: sizes.into(),
                binaries: &all,
                new: new.id(),
            };
            let (status, body) =
                rt::lost(rt::connection()?.call(&record, |status, body| (status, body.to_vec())))?;
            // None of a request that never came to the driver.
            let states = Decoder::new(&body).i32s().unwrap_or_default();
            for (i, state) in states.iter().enumerate().take(n as usize) {
                if *state != UNWRITTEN && !binary_status.is_null() {
                    binary_status.add(i).write(*state);
                }
            }
            if status != wire::SUCCESS {
                return Err(status);
            }
            Ok(new.publish())
        })
    }
}

/// A program of kernels that the device has.
pub unsafe extern "C" fn clCreateProgramWithBuiltInKernels(
    context: Handle,
    n: u32,
    devices: *const Handle,
    names: *const c_char,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let context = rt::object(context, kind::CONTEXT)?;
            let devices = rt::list(n, devices, kind::DEVICE)?;
            let names = rt::string(names)?;
            let new = program(context, Some(&devices), Vec::new())?;
            rt::call(&wire::CreateProgramWithBuiltInKernels {
                context: context.id(),
                devices: devices.iter().map(|d| d.id()).collect::<Vec<_>>().into(),
                names,
                new: new.id(),
            })?;
            Ok(new.publish())
        })
    }
}

/// A program from intermediate language.
pub unsafe extern "C" fn clCreateProgramWithIL(
    context: Handle,
    il: *const c_void,
    length: usize,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let context = rt::object(context, kind::CONTEXT)?;
            if il.is_null() || length == 0 {
                return Err(cl::INVALID_VALUE);
            }
            let il = std::slice::from_raw_parts(il.cast::<u8>(), length);
            too_long(il)?;
            let new = program(context, None, Vec::new())?;
            rt::call(&wire::CreateProgramWithIL { context: context.id(), il, new: new.id() })?;
            Ok(new.publish())
        })
    }
}

/// Registers a program's callback; 0: none. The program lives until it was called.
fn notify(f: ProgramNotify, user: *mut c_void, program: Obj) -> Result<u64, i32> {
    let Some(f) = f else {
        return if user.is_null() { Ok(0) } else { Err(cl::INVALID_VALUE) };
    };
    let (user, held) = (user as usize, rt::hold(program));
    Ok(rt::connection()?.callback(Box::new(move |_, _| {
        // SAFETY: the program registered this function with this pointer.
        unsafe { f(held.obj().handle(), user as *mut c_void) };
        false
    })))
}

/// The ids of devices, where none means all.
unsafe fn some_devices(n: u32, list: *const Handle) -> Result<Vec<u64>, i32> {
    if n == 0 && list.is_null() {
        return Ok(Vec::new());
    }
    // SAFETY: as the caller promises.
    unsafe { rt::objects(n, list, kind::DEVICE) }
}

/// A C string that may be absent.
unsafe fn options<'a>(text: *const c_char) -> Result<Option<&'a [u8]>, i32> {
    // SAFETY: as the caller promises.
    if text.is_null() { Ok(None) } else { unsafe { rt::string(text).map(Some) } }
}

/// The files that go along with a program: what it includes, but for the names of headers that the program passes itself.
fn included(program: Obj, options: Option<&[u8]>, headers: &[&[u8]]) -> Result<include::Files, i32> {
    let program = program.program()?;
    let folders = include::folders(&String::from_utf8_lossy(options.unwrap_or_default()));
    let mut files = include::gather(&program.source, &folders);
    files.retain(|(_, name), _| !headers.contains(&name.as_bytes()));
    let own = options.filter(|_| !files.is_empty()).map(<[u8]>::to_vec);
    *program.options.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)? = own;
    Ok(files)
}

/// Takes a callback back if its call failed. (A failed build still calls it: only codes that say the call itself was wrong count.)
fn settle<T>(result: Result<T, i32>, notify: u64) -> Result<T, i32> {
    result.inspect_err(|_| rt::connection().into_iter().for_each(|c| c.forget_callback(notify)))
}

pub unsafe extern "C" fn clBuildProgram(
    program: Handle,
    n: u32,
    devices: *const Handle,
    text: *const c_char,
    f: ProgramNotify,
    user: *mut c_void,
) -> i32 {
    rt::status(|| {
        let program = rt::object(program, kind::PROGRAM)?;
        // SAFETY: as the API says.
        let (devices, options) = unsafe { (some_devices(n, devices)?, options(text)?) };
        let included = included(program, options, &[])?;
        let notify = notify(f, user, program)?;
        let record = wire::BuildProgram {
            program: program.id(),
            devices: devices.into(),
            options,
            notify,
            folders: included.keys().map(|(folder, _)| *folder).collect::<Vec<_>>().into(),
            files: included.keys().map(|(_, name)| name.as_bytes()).collect(),
            texts: included.values().map(Vec::as_slice).collect(),
        };
        settle(rt::call(&record), notify).map(|_| ())
    })
}

/// Compiles a program, without linking.
pub unsafe extern "C" fn clCompileProgram(
    program: Handle,
    n: u32,
    devices: *const Handle,
    text: *const c_char,
    n_headers: u32,
    headers: *const Handle,
    names: *const *const c_char,
    f: ProgramNotify,
    user: *mut c_void,
) -> i32 {
    rt::status(|| {
        let program = rt::object(program, kind::PROGRAM)?;
        // SAFETY: as the API says.
        unsafe {
            let (devices, options) = (some_devices(n, devices)?, options(text)?);
            if (n_headers == 0) != (headers.is_null() && names.is_null())
                || headers.is_null() != names.is_null()
            {
                return Err(cl::INVALID_VALUE);
            }
            let (headers, names) = if n_headers == 0 {
                (Vec::new(), Vec::new())
            } else {
                let names = std::slice::from_raw_parts(names, n_headers as usize);
                let names = names.iter().map(|s| rt::string(*s)).collect::<Result<Vec<_>, _>>()?;
                (rt::objects(n_headers, headers, kind::PROGRAM)?, names)
            };
            let included = included(program, options, &names)?;
            let notify = notify(f, user, program)?;
            let record = wire::CompileProgram {
                program: program.id(),
                devices: devices.into(),
                options,
                headers: headers.into(),
                names,
                notify,
                folders: included.keys().map(|(folder, _)| *folder).collect::<Vec<_>>().into(),
                files: included.keys().map(|(_, name)| name.as_bytes()).collect(),
                texts: included.values().map(Vec::as_slice).collect(),
            };
            settle(rt::call(&record), notify).map(|_| ())
        }
    })
}

/// Links programs into a new one.
pub unsafe extern "C" fn clLinkProgram(
    context: Handle,
    n: u32,
    devices: *const Handle,
    text: *const c_char,
    n_programs: u32,
    programs: *const Handle,
    f: ProgramNotify,
    user: *mut c_void,
    errcode: *mut i32,
) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let context = rt::object(context, kind::CONTEXT)?;
            let listed =
                if n == 0 && devices.is_null() { None } else { Some(rt::list(n, devices, kind::DEVICE)?) };
            let options = options(text)?;
            let programs = rt::objects(n_programs, programs, kind::PROGRAM)?;
            let new = program(context, listed.as_deref(), Vec::new())?;
            let object = new.object().ok_or(cl::OUT_OF_HOST_MEMORY)?;
            let notify = notify(f, user, object)?;
            let ids = listed.unwrap_or_default().iter().map(|d| d.id()).collect::<Vec<_>>();
            let record = wire::LinkProgram {
                context: context.id(),
                devices: ids.into(),
                options,
                programs: programs.into(),
                notify,
                new: new.id(),
            };
            settle(rt::call(&record), notify)?;
            Ok(new.publish())
        })
    }
}

/// Withdrawn by its specification; no driver has to support it.
pub unsafe extern "C" fn clSetProgramReleaseCallback(
    program: Handle,
    _f: ProgramNotify,
    _user: *mut c_void,
) -> i32 {
    rt::status(|| {
        rt::object(program, kind::PROGRAM)?;
        Err(wire::UNSUPPORTED)
    })
}

/// A property of a program.
pub unsafe extern "C" fn clGetProgramInfo(
    program: Handle,
    param: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    rt::status(|| {
        let object = rt::object(program, kind::PROGRAM)?;
        let bytes = match param {
            cl::PROGRAM_REFERENCE_COUNT..=cl::PROGRAM_DEVICES => crate::local::answer(object, param)?,
            cl::PROGRAM_BINARIES => {
                let count = object.program()?.devices.len();
                let bytes = count * size_of::<*mut u8>();
                if !value.is_null() {
                    if size < bytes {
                        return Err(cl::INVALID_VALUE);
                    }
                    let reply = rt::call(&wire::ProgramBinaries { program: object.id() })?;
                    let binaries = Decoder::new(&reply).strs().map_err(|_| wire::LOST)?;
                    for (i, binary) in binaries.iter().enumerate().take(count) {
                        // SAFETY: an array of pointers, each null or with room for its binary, as the API says.
                        unsafe {
                            let to = *value.cast::<*mut u8>().add(i);
                            if !to.is_null() {
                                std::ptr::copy_nonoverlapping(binary.as_ptr(), to, binary.len());
                            }
                        }
                    }
                }
                // SAFETY: as the API says.
                unsafe { rt::write(size_ret, bytes) };
                return Ok(());
            }
            _ => rt::call(&wire::GetProgramInfo { program: object.id(), param })?,
        };
        // SAFETY: as the API says.
        unsafe { rt::answer(&bytes, size, value, size_ret) }
    })
}

/// A property of a program's build. Its options are those that the program gave.
pub unsafe extern "C" fn clGetProgramBuildInfo(
    program: Handle,
    device: Handle,
    param: u32,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    rt::status(|| {
        let program = rt::object(program, kind::PROGRAM)?;
        let device = rt::object(device, kind::DEVICE)?;
        let mut bytes =
            rt::call(&wire::GetProgramBuildInfo { program: program.id(), device: device.id(), param })?;
        if param == cl::PROGRAM_BUILD_OPTIONS {
            if let Some(own) = &*program.program()?.options.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)? {
                bytes = [own.as_slice(), b"\0"].concat();
            }
        }
        // SAFETY: as the API says.
        unsafe { rt::answer(&bytes, size, value, size_ret) }
    })
}
