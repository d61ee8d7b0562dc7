// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs and kernels.

use crate::rt::{self, ARENA, Handle, Id, Obj};
use crate::state::{Argument, As, Body, Kernel, Program};
use crate::sure;
use std::ffi::{c_char, c_void};
use std::sync::Mutex;
use tombolo_accel_client::include;
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

fn kernel(program: Obj) -> Result<rt::New, i32> {
    let kernel = Kernel { program: rt::hold(program), learned: Mutex::default() };
    rt::new_object(kind::KERNEL, Body::Kernel(kernel))
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
                    rt::write(
                        binary_status.wrapping_add(i * usize::from(!binary_status.is_null())),
                        cl::INVALID_VALUE,
                    );
                    return Err(cl::INVALID_VALUE);
                }
                all.extend_from_slice(std::slice::from_raw_parts(start, len));
                sizes.push(len as u64);
            }
            too_long(&all)?;
            let new = program(context, Some(&devices), Vec::new())?;
            let reply = rt::call(&wire::CreateProgramWithBinary {
                context: context.id(),
                devices: devices.iter().map(|d| d.id()).collect::<Vec<_>>().into(),
                lengths: sizes.into(),
                binaries: &all,
                new: new.id(),
            })?;
            let states = Decoder::new(&reply).i32s().map_err(|_| wire::LOST)?;
            if !binary_status.is_null() {
                for (i, state) in states.iter().enumerate().take(n as usize) {
                    binary_status.add(i).write(*state);
                }
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

/// A kernel of a program.
pub unsafe extern "C" fn clCreateKernel(p: Handle, name: *const c_char, errcode: *mut i32) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let p = rt::object(p, kind::PROGRAM)?;
            let name = rt::string(name)?;
            let new = kernel(p)?;
            rt::call(&wire::CreateKernel { program: p.id(), name, new: new.id() })?;
            Ok(new.publish())
        })
    }
}

pub unsafe extern "C" fn clCreateKernelsInProgram(
    p: Handle,
    n: u32,
    kernels: *mut Handle,
    count: *mut u32,
) -> i32 {
    rt::status(|| {
        let p = rt::object(p, kind::PROGRAM)?;
        if kernels.is_null() != (n == 0) {
            return Err(cl::INVALID_VALUE);
        }
        let wanted = n.min(4096);
        let new = (0..wanted).map(|_| kernel(p)).collect::<Result<Vec<_>, _>>()?;
        let ids: Vec<u64> = new.iter().map(|n| n.id()).collect();
        let reply = rt::call(&wire::CreateKernelsInProgram { program: p.id(), new: ids.into() })?;
        let made = Decoder::new(&reply).u32().map_err(|_| wire::LOST)?;
        // SAFETY: room for n handles and a count, as the API says.
        unsafe {
            if !kernels.is_null() {
                for (i, new) in new.into_iter().enumerate().take(made as usize) {
                    kernels.add(i).write(new.publish());
                }
            }
            rt::write(count, made);
        }
        Ok(())
    })
}

/// A copy of a kernel with its arguments.
pub unsafe extern "C" fn clCloneKernel(source: Handle, errcode: *mut i32) -> Handle {
    // SAFETY: all pointers as the API says.
    unsafe {
        rt::create(errcode, || {
            let source = rt::object(source, kind::KERNEL)?;
            let new = kernel(source.kernel()?.program.obj())?;
            rt::call(&wire::CloneKernel { kernel: source.id(), new: new.id() })?;
            Ok(new.publish())
        })
    }
}

/// An argument, as far as it matters to a driver: is it a buffer of this kernel's context, how large is the local memory?
fn argument(kernel: Obj, object: Option<Obj>, null: bool, size: usize) -> Argument {
    let Some(object) = object else {
        return if null { Argument::Null(size) } else { Argument::Value(size) };
    };
    if object.body().context() != kernel.body().context() {
        return Argument::Doubtful;
    }
    match object.body() {
        Body::Mem(m) => Argument::Object(kind::MEM, m.object_type, m.origin),
        Body::Queue(_) => Argument::Object(kind::QUEUE, 0, 0),
        _ => Argument::Object(kind::SAMPLER, 0, 0),
    }
}

/// Sets an argument. Eight bytes may be a value or a handle: the server knows by the kernel, so it gets both. Posted if the driver accepted
/// the same kind of argument before.
pub unsafe extern "C" fn clSetKernelArg(
    kernel: Handle,
    index: u32,
    size: usize,
    value: *const c_void,
) -> i32 {
    const PLAIN: u32 = 0;
    const NULL: u32 = 1;
    const NAMES_OBJECT: u32 = 2;
    const ASKS: u32 = 3;
    rt::status(|| {
        let kernel = rt::object(kernel, kind::KERNEL)?;
        let bytes: &[u8] = if value.is_null() {
            &[]
        } else if size <= 64 << 10 {
            let is_known = || -> Result<bool, i32> {
                let learned = kernel.kernel()?.learned.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?;
                Ok(learned.accepts(index, Argument::Value(size)))
            };
            // A driver compares sizes before it reads; so behind the value of a program that is wrong about the size there may be nothing to read.
            if size > size_of::<Handle>() && !is_known()? {
                let (kernel, size) = (kernel.id(), size as u64);
                rt::call(&wire::SetKernelArg { kernel, index, how: ASKS, size, handle: 0, value: &[] })?;
            }
            // SAFETY: size bytes, as the API says.
            unsafe { std::slice::from_raw_parts(value.cast(), size) }
        } else {
            return Err(cl::INVALID_ARG_SIZE);
        };
        let object = bytes.first_chunk::<8>().filter(|_| size == 8).and_then(|b| {
            let handle = usize::from_ne_bytes(*b) as *const c_void;
            [kind::MEM, kind::SAMPLER, kind::QUEUE].into_iter().find_map(|k| ARENA.find(handle, k))
        });
        let argument = argument(kernel, object, value.is_null(), size);
        let how = match object {
            Some(_) => NAMES_OBJECT,
            None if value.is_null() => NULL,
            None => PLAIN,
        };
        let record = wire::SetKernelArg {
            kernel: kernel.id(),
            index,
            how,
            size: size as u64,
            handle: object.map_or(0, |o| o.id()),
            value: bytes,
        };
        // Held until the request is in the ring: what is learned must not overtake what the server does.
        let mut learned = kernel.kernel()?.learned.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?;
        if learned.accepts(index, argument) {
            rt::lost(rt::connection()?.post(&record))?;
        } else {
            rt::call(&record)?;
            learned.accept(index, argument);
        }
        learned.set(index, argument);
        Ok(())
    })
}

/// Further properties of a launch.
pub unsafe extern "C" fn clSetKernelExecInfo(
    kernel: Handle,
    param: u32,
    size: usize,
    value: *const c_void,
) -> i32 {
    rt::status(|| {
        let kernel = rt::object(kernel, kind::KERNEL)?;
        // SAFETY: as the API says.
        let value = unsafe { rt::bytes(value, size)? };
        rt::call(&wire::SetKernelExecInfo { kernel: kernel.id(), param, value }).map(|_| ())
    })
}

/// A property of a kernel's sub-groups.
pub unsafe extern "C" fn clGetKernelSubGroupInfo(
    kernel: Handle,
    device: Handle,
    param: u32,
    input_size: usize,
    input: *const c_void,
    size: usize,
    value: *mut c_void,
    size_ret: *mut usize,
) -> i32 {
    rt::status(|| {
        let kernel = rt::object(kernel, kind::KERNEL)?;
        let device = rt::maybe(device, kind::DEVICE)?.map_or(0, |d| d.id());
        // SAFETY: as the API says.
        let input = if input_size == 0 { &[][..] } else { unsafe { rt::bytes(input, input_size)? } };
        let reply = rt::call(&wire::GetKernelSubGroupInfo { kernel: kernel.id(), device, param, input })?;
        // SAFETY: as the API says.
        unsafe { rt::answer(&reply, size, value, size_ret) }
    })
}

/// Launches a kernel. Posted if the driver accepted a launch of this shape before.
pub unsafe extern "C" fn clEnqueueNDRangeKernel(
    queue: Handle,
    kernel: Handle,
    work_dim: u32,
    offset: *const usize,
    global: *const usize,
    local: *const usize,
    n: u32,
    list: *const Handle,
    event: *mut Handle,
) -> i32 {
    rt::status(|| {
        let queue = rt::object(queue, kind::QUEUE)?;
        let kernel = rt::object(kernel, kind::KERNEL)?;
        // Drivers take a list of none here, and programs pass it.
        // SAFETY: as the API says.
        let waits = if n == 0 { Vec::new() } else { unsafe { rt::waits(n, list)? } };
        let sizes = |from: *const usize| {
            let mut out = [0; 3];
            if !from.is_null() {
                for (i, to) in out.iter_mut().enumerate().take(work_dim as usize) {
                    // SAFETY: work_dim numbers, as the API says.
                    *to = unsafe { *from.add(i) } as u64;
                }
            }
            out
        };
        let present = u32::from(!offset.is_null())
            | u32::from(!global.is_null()) << 1
            | u32::from(!local.is_null()) << 2;
        let new = rt::new_event(queue, !event.is_null(), cl::COMMAND_NDRANGE_KERNEL)?;
        let record = wire::EnqueueNDRangeKernel {
            queue: queue.id(),
            kernel: kernel.id(),
            work_dim,
            present,
            offset: sizes(offset),
            global: sizes(global),
            local: sizes(local),
            waits: waits.into(),
            event: new.id(),
        };
        let sure = sure::launch(queue, kernel, &record);
        // SAFETY: as the API says.
        unsafe { rt::submit(&record, sure, new, event)? };
        if !sure {
            let device = queue.queue()?.device.id();
            let like = (work_dim, record.local, device);
            kernel.kernel()?.learned.lock().map_err(|_| cl::OUT_OF_HOST_MEMORY)?.launch(like);
        }
        Ok(())
    })
}
