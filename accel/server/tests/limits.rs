// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Error codes are equal, call by call: every function of the declarations is called with each of its arguments at its limits (null, zero,
//! huge, of another context, duplicate, every bit of its flags), natively and forwarded. The calls are generated from `opencl.api`;
//! here stands what a good value of each parameter is. Where the native driver dies, its answer isn't asked for, but the client must live.
//! Differences on purpose stand in `accel/tests/limits.expected`.

mod rig;

use rig::{Server, compile_with, folder, native};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use tombolo_accel_gen::api::{Api, Class, Function, Param, Type};
use tombolo_accel_gen::parse::parse;
use tombolo_accel_spec::OPENCL_API;

/// The code of a program that lost its connection.
const GONE: i32 = 3;

/// Functions that aren't called: they aren't the API's, would call an address of no function, or end what others need.
fn is_called(f: &Function) -> bool {
    f.name.starts_with("cl")
        && !f.name.starts_with("clIcd")
        && !f.name.starts_with("clRelease")
        && !f.name.starts_with("clRetain")
        && f.class != Class::None
}

/// A good value of a parameter.
fn good(f: &Function, p: &Param) -> String {
    let of_function = match (f.name.as_str(), p.name.as_str()) {
        ("clCreateImage2D" | "clCreateImage3D", n) if n.ends_with("width") || n.ends_with("height") => "8",
        ("clCreateImage3D", "image_depth") => "2",
        ("clCreateSampler", "addressing_mode") => "CL_ADDRESS_NONE",
        ("clCreateSampler", "filter_mode") => "CL_FILTER_NEAREST",
        ("clGetSupportedImageFormats", "image_type") => "CL_MEM_OBJECT_IMAGE2D",
        ("clCreateContextFromType" | "clGetDeviceIDs", "device_type") => "CL_DEVICE_TYPE_ALL",
        ("clCreateSubDevices", "properties") => {
            "((cl_device_partition_property[]){CL_DEVICE_PARTITION_EQUALLY, 1, 0})"
        }
        ("clCreateSubDevices" | "clGetDeviceIDs" | "clGetPlatformIDs" | "clCreateKernelsInProgram", n)
            if n.starts_with("num_") && !n.contains("ret") && !matches!(p.ty, Type::Out(_)) =>
        {
            "1"
        }
        ("clCreateCommandQueue" | "clSetCommandQueueProperty", "properties") => "0",
        ("clBuildProgram" | "clCompileProgram", "program") => "fresh_program()",
        ("clLinkProgram", "input_programs") => "&compiled",
        ("clSetKernelArg", "kernel") => "fresh_kernel()",
        ("clSetKernelArg", "arg_value") => "&buffer",
        ("clSetKernelArg", "arg_size") => "8",
        ("clSetKernelArgSVMPointer", "arg_value") => "svm",
        ("clSetUserEventStatus", "event") => "user_event()",
        ("clEnqueueUnmapMemObject", "memobj") => "(mapped = map(), buffer)",
        ("clEnqueueUnmapMemObject", "mapped_ptr") => "mapped",
        ("clEnqueueMapImage", "image") => "image",
        ("clEnqueueMapBuffer" | "clEnqueueMapImage" | "clEnqueueSVMMap", "map_flags" | "flags") => {
            "CL_MAP_READ"
        }
        ("clSetKernelExecInfo", "param_name") => "CL_KERNEL_EXEC_INFO_SVM_PTRS",
        ("clSetKernelExecInfo", "param_value") => "&svm",
        ("clSetKernelExecInfo", "param_value_size") => "8",
        ("clSetProgramSpecializationConstant", "spec_size") => "4",
        ("clGetKernelSubGroupInfo", "param_name") => "CL_KERNEL_MAX_NUM_SUB_GROUPS",
        ("clGetKernelSubGroupInfo", "param_value_size") => "8",
        ("clGetKernelSubGroupInfo", "input_value_size") => "0",
        ("clEnqueueSVMMemcpy", "dst_ptr") => "svm",
        ("clEnqueueSVMMemcpy", "src_ptr") => "host",
        ("clEnqueueSVMFree", "num_svm_pointers") | ("clEnqueueSVMMigrateMem", "num_svm_pointers") => "1",
        ("clEnqueueSVMFree", "svm_pointers") => "((void *[]){clSVMAlloc(context, CL_MEM_READ_WRITE, 64, 0)})",
        ("clSVMFree", "svm_pointer") => "NULL",
        ("clEnqueueSVMMigrateMem", "svm_pointers") => "(const void *[]){svm}",
        ("clGetExtensionFunctionAddress" | "clGetExtensionFunctionAddressForPlatform", _)
            if p.name == "func_name" =>
        {
            "\"clCreateSubDevicesEXT\""
        }
        ("clCreateProgramWithBinary", "lengths") => "&eight",
        ("clCreateProgramWithBinary", "binaries") => {
            "(const unsigned char *[]){(unsigned char *)\"nonsense\"}"
        }
        ("clCreateProgramWithBinary", "binary_status") => "(cl_int *)host",
        ("clCreatePipe", "pipe_packet_size" | "pipe_max_packets") => "4",
        ("clGetPipeInfo", "pipe") => "buffer",
        ("clGetImageInfo", _) if p.name == "image" => "image",
        ("clCompileProgram", "num_input_headers") => "0",
        ("clCompileProgram", "input_headers") => "NULL",
        _ => "",
    };
    if !of_function.is_empty() {
        return of_function.into();
    }
    let by_name = match p.name.as_str() {
        "size" | "cb" => "64",
        "count" | "num_devices" | "num_events" | "num_mem_objects" | "num_input_programs" | "work_dim"
            if matches!(p.ty, Type::Int(_)) =>
        {
            "1"
        }
        "event_wait_list" => "NULL",
        "pattern" | "fill_color" | "spec_value" | "input_value" => "zeros",
        "pattern_size" => "4",
        "blocking_read" | "blocking_write" | "blocking_map" | "blocking_copy" => "1",
        "region" => "one3",
        "image_format" => "&format",
        "image_desc" => "&desc",
        "buffer_create_type" => "CL_BUFFER_CREATE_TYPE_REGION",
        "buffer_create_info" => "&part",
        "strings" => "&source",
        "il" => "\"nonsense\"",
        "length" => "8",
        "kernel_name" => "\"f\"",
        "kernel_names" => "\"nonsense\"",
        "options" => "\"\"",
        "global_work_size" => "&eight",
        "data_ptr" | "param_value" => "host",
        "svm_ptr" => "svm",
        "param_value_size_ret" => "&out_size",
        "image_row_pitch" | "image_slice_pitch" if matches!(p.ty, Type::Out(_)) => "&out_size",
        "dst_buffer" | "dst_image" | "compiled" => &p.name,
        _ => "",
    };
    if !by_name.is_empty() {
        return by_name.into();
    }
    match &p.ty {
        Type::Handle(kind, _) => handle(kind, &p.name),
        Type::Handles(kind, _) => format!("&{}", handle(kind, &p.name)),
        Type::Triple => "zero3".into(),
        Type::Int(_) => "0".into(),
        Type::Str(_) => "\"\"".into(),
        Type::Out(t) => match &**t {
            Type::Int(t) if t == "u64" => "(void *)&out_ulong".into(),
            Type::Int(t) if t == "usize" => "&out_size".into(),
            Type::Int(_) if p.name == "errcode_ret" => "&code".into(),
            Type::Int(_) => "&out_uint".into(),
            Type::Handle(kind, _) if kind == "event" => "&out_event".into(),
            _ => "(void *)host".into(),
        },
        _ => "NULL".into(),
    }
}

fn handle(kind: &str, parameter: &str) -> String {
    match kind {
        "mem" if parameter.contains("image") => "image".into(),
        "mem" => "buffer".into(),
        other => other.into(),
    }
}

/// Values at the limits of a parameter: what to call it, and in C.
fn limits(f: &Function, p: &Param) -> Vec<String> {
    let good = good(f, p);
    let texts = |list: &[&str]| list.iter().map(|s| s.to_string()).collect::<Vec<_>>();
    let bits = ["flags", "map_flags", "device_type"].contains(&p.name.as_str())
        || p.name == "properties" && good == "0";
    let counts = f.params.iter().any(|other| match &other.ty {
        Type::Handles(_, Some(count)) | Type::Bytes(count) => *count == p.name,
        // Lists of pointers and their lengths.
        Type::Ptr => ["count", "num_svm_pointers", "num_input_headers", "length", "param_value_size"]
            .contains(&p.name.as_str()),
        _ => false,
    });
    match &p.ty {
        // The driver looks at the size first, the client at the value: it must be readable.
        _ if p.name == "arg_size" => texts(&["0", "1", "3", "4", "7", "9", "16", "1ul << 31", "~0ul"]),
        _ if p.name == "arg_value" => texts(&["NULL", "&image", "&queue", "&buffer2"]),
        Type::Handle(kind, _) => {
            let others = match kind.as_str() {
                "queue" => &["NULL", "queue2"][..],
                "mem" => &["NULL", "buffer2", "image", "buffer"],
                "event" => &["NULL", "event2"],
                "context" => &["NULL", "context2"],
                _ => &["NULL"],
            };
            texts(others)
        }
        Type::Handles(kind, _) if kind == "event" => texts(&["NULL", "((cl_event[]){NULL})", "&event2"]),
        Type::Handles(kind, _) if kind == "mem" => {
            texts(&["NULL", "((cl_mem[]){NULL})", "&buffer2", "&image"])
        }
        Type::Handles(..) => texts(&["NULL", "(void *)((void *[]){NULL})"]),
        // The outcome of a wrong count depends on the memory behind the list.
        Type::Int(_) if counts && p.name == "pattern_size" => texts(&[
            "0",
            "1",
            "2",
            "3",
            "5",
            "8",
            "16",
            "64",
            "128",
            "129",
            "256",
            "1024",
            "65536",
            "1 << 20",
            "(1 << 20) + 1",
        ]),
        Type::Int(_) if counts => texts(&["0"]),
        Type::Int(_) if p.name.starts_with("num_") => texts(&["0"]),
        Type::Int(_) if bits => {
            let mut all: Vec<String> = (0..64).map(|bit| format!("(cl_ulong)1 << {bit}")).collect();
            all.extend(texts(&[
                "0",
                "3",
                "5",
                "6",
                "7",
                "8 | 16",
                "8 | 32",
                "16 | 32",
                "128 | 256",
                "~(cl_ulong)0",
            ]));
            all
        }
        Type::Int(t) if t == "u32" || t == "i32" => {
            texts(&["0", "1", "2", "3", "4", "5", "255", "0x1000", "0x7fffffff", "0x80000000", "0xffffffff"])
        }
        Type::Int(_) => texts(&[
            "0",
            "1",
            "3",
            "4",
            "63",
            "64",
            "65",
            "4032",
            "4033",
            "4096",
            "4097",
            "1ul << 31",
            "1ul << 32",
            "1ul << 40",
            "1ul << 62",
            "1ul << 63",
            "~0ul",
        ]),
        Type::Triple => texts(&[
            "NULL",
            "zero3",
            "one3",
            "((size_t[]){8, 1, 1})",
            "((size_t[]){9, 1, 1})",
            "((size_t[]){4, 8, 2})",
            "((size_t[]){0, 1, 1})",
            "((size_t[]){1, 0, 1})",
            "((size_t[]){~0ul, 1, 1})",
            "((size_t[]){1, ~0ul, 1})",
            "((size_t[]){1, 1, 1ul << 62})",
        ]),
        Type::Str(_) => texts(&["NULL", "\"\"", "\"nonsense\"", "\" \""]),
        Type::Out(_) if p.name == "errcode_ret" => Vec::new(),
        Type::Out(_) => texts(&["NULL"]),
        Type::Bytes(_) => texts(&["NULL"]),
        Type::Ptr if p.name == "lengths" && good == "&eight" => texts(&["NULL", "zero3"]),
        Type::Ptr if p.name == "binaries" => texts(&["NULL", "(const unsigned char *[]){NULL}"]),
        Type::Ptr if p.name.starts_with("pfn") => Vec::new(),
        Type::Ptr if p.name == "user_data" => texts(&["host"]),
        Type::Ptr if p.name == "host_ptr" => texts(&["host"]),
        Type::Ptr if p.name == "mapped_ptr" => texts(&["NULL", "host"]),
        Type::Ptr if p.name == "svm_pointer" => texts(&["NULL"]),
        Type::Ptr if good == "NULL" => Vec::new(),
        Type::Ptr => texts(&["NULL"]),
        _ => Vec::new(),
    }
}

/// The cases of a command that waits for an event which fails. None for a function that is no such command.
fn failing(out: &mut String, f: &Function, args: &[String], implied: bool) {
    let named = |name: &str| f.params.iter().position(|p| p.name == name);
    let mut args = args.to_vec();
    if implied {
        args.extend(["1", "&waiting", "&out_event"].map(String::from));
    } else {
        let (Some(count), Some(list), Some(event)) =
            (named("num_events_in_wait_list"), named("event_wait_list"), named("event"))
        else {
            return;
        };
        for (at, value) in [(count, "1"), (list, "&waiting"), (event, "&out_event")] {
            args[at] = value.into();
        }
    }
    for (i, p) in f.params.iter().enumerate() {
        if p.name.starts_with("blocking") {
            args[i] = "0".into();
        }
    }
    let call = format!("{}({})", f.name, args.join(", "));
    let call = if f.is("pointer") { format!("!!{call}") } else { call };
    for (order, properties) in [("in order", "0"), ("out of order", "CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE")]
    {
        writeln!(out, "FAILS(\"{} fails {order}\", {properties}, {call});", f.name).expect("a string");
    }
}

/// A case: what it is called, and its call.
fn case(out: &mut String, f: &Function, what: &str, args: &[String]) {
    let call = format!("{}({})", f.name, args.join(", "));
    let text = format!("{} {what}", f.name).replace('"', "'");
    let has_code = matches!(f.class, Class::Create(_)) || f.params.iter().any(|p| p.name == "errcode_ret");
    let written = match f.class {
        Class::Info => writeln!(out, "ASKED(\"{text}\", {call});"),
        _ if f.name == "clSVMFree" => writeln!(out, "CASE(\"{text}\", ({call}, 0));"),
        _ if has_code || f.is("pointer") => writeln!(out, "MADE(\"{text}\", {call});"),
        _ => writeln!(out, "CASE(\"{text}\", {call});"),
    };
    written.expect("a string takes everything");
}

/// A function with its parameters as C has them.
fn in_c(f: &Function) -> Function {
    let params = f.params.iter().map(|p| Param { name: p.name.clone(), ty: p.ty.in_c() }).collect();
    Function { params, ..f.clone() }
}

fn cases(api: &Api) -> String {
    let mut out = String::new();
    for f in &api.functions.iter().filter(|f| is_called(f)).map(in_c).collect::<Vec<_>>() {
        let args: Vec<String> = f.params.iter().map(|p| good(f, p)).collect();
        // The parameters that a function's class adds.
        let implied: &[&str] = match f.class {
            Class::Info => &["param", "size", "value", "&ret"],
            Class::Enqueue | Class::Transfer(_) => &["0", "NULL", "NULL"],
            Class::Create(_) => &["&code"],
            _ => &[],
        };
        let with = |args: &[String], implied: &[&str]| -> Vec<String> {
            args.iter().cloned().chain(implied.iter().map(|s| s.to_string())).collect()
        };
        case(&mut out, f, "as it should be", &with(&args, implied));
        failing(&mut out, f, &args, matches!(f.class, Class::Enqueue | Class::Transfer(_)));
        for (i, p) in f.params.iter().enumerate() {
            for limit in limits(f, p) {
                let mut args = args.clone();
                args[i].clone_from(&limit);
                case(&mut out, f, &format!("{} = {limit}", p.name), &with(&args, implied));
            }
        }
        let others: &[&[&str]] = match f.class {
            Class::Info => &[
                &["param", "0", "value", "&ret"],
                &["param", "1", "value", "&ret"],
                &["param", "0", "NULL", "&ret"],
                &["param", "size", "value", "NULL"],
            ],
            Class::Enqueue | Class::Transfer(_) => &[
                &["0", "&event", "NULL"],
                &["1", "NULL", "NULL"],
                &["1", "&event", "&out_event"],
                &["1", "((cl_event[]){NULL})", "NULL"],
                &["2", "((cl_event[]){event, event})", "NULL"],
                &["1", "&event2", "NULL"],
                &["0", "NULL", "&out_event"],
            ],
            Class::Create(_) => &[&["NULL"]],
            _ => &[],
        };
        for other in others {
            case(&mut out, f, &format!("with {}", other.join(", ")), &with(&args, other));
        }
        // The same twice, in every list.
        for (i, p) in f.params.iter().enumerate() {
            let Type::Handles(kind, Some(count)) = &p.ty else { continue };
            let Some(counted) = f.params.iter().position(|p| p.name == *count) else { continue };
            if args[i] == "NULL" {
                continue;
            }
            let (mut args, ty) = (args.clone(), c_type(kind));
            let one = args[i].trim_start_matches('&').to_string();
            (args[i], args[counted]) = (format!("(({ty}[]){{{one}, {one}}})"), "2".into());
            case(&mut out, f, &format!("{} twice the same", p.name), &with(&args, implied));
        }
    }
    out
}

fn c_type(kind: &str) -> &'static str {
    match kind {
        "device" => "cl_device_id",
        "event" => "cl_event",
        "program" => "cl_program",
        _ => "cl_mem",
    }
}

/// The answers of a run: by case, or None where the program died of it.
fn answers(program: &Path, mut run: impl FnMut(&Path) -> Command) -> BTreeMap<String, Option<String>> {
    let mut answers = BTreeMap::new();
    let mut start = 0;
    loop {
        let output = run(program).arg(start.to_string()).output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut last = None;
        for line in text.lines() {
            if line == "end" {
                assert!(answers.len() > 1000, "the cases were generated");
                return answers;
            }
            let (number, rest) = line.split_once(' ').unwrap_or_else(|| panic!("{line}"));
            let (what, answer) = rest.rsplit_once(": ").unwrap_or((rest.trim_end_matches(": "), ""));
            last = Some((number.parse::<usize>().unwrap_or_else(|_| panic!("{line}")), what.to_string()));
            answers.insert(what.to_string(), Some(answer.to_string()).filter(|a| a.contains("finish")));
        }
        // It died of the last one, or lost its connection by it.
        let (number, what) = last.unwrap_or_else(|| panic!("{program:?} from {start}: {output:?}"));
        if output.status.code() != Some(GONE) || !answers.contains_key(&what) {
            answers.insert(what.clone(), None);
        }
        if output.status.code() == Some(GONE) {
            answers.insert(what, Some("lost".into()));
        }
        start = number + 1;
    }
}

/// Returns whether a text is like a pattern that may end with `*`.
fn is_like(text: &str, pattern: &str) -> bool {
    pattern.strip_suffix('*').map_or(text == pattern, |front| text.starts_with(front))
}

/// The version of the driver that is measured against, such as `6`.
fn version() -> String {
    let said = native(Path::new("clinfo")).arg("--raw").output().expect("clinfo runs").stdout;
    let text = String::from_utf8_lossy(&said).into_owned();
    let words = text.lines().find_map(|line| line.split_once("CL_DRIVER_VERSION"));
    let version = words.map(|(_, version)| version.trim().split('.').next().unwrap_or_default().to_owned());
    version.unwrap_or_else(|| panic!("{text}"))
}

/// Cases whose answers differ on purpose, each with the native and the forwarded answer, and how many were seen.
fn expected() -> Vec<(String, String, String, u32)> {
    let text = include_str!("../../tests/limits.expected");
    let own = format!("[{}] ", version());
    let lines = text.lines().filter(|l| !l.is_empty() && !l.starts_with('#'));
    let lines = lines.map(|l| l.strip_prefix(own.as_str()).unwrap_or(l)).filter(|l| !l.starts_with('['));
    let split = |line: &str| {
        let mut parts = line.split(" | ").map(str::to_string);
        let mut next =
            || parts.next().unwrap_or_else(|| panic!("{line}: expected CASE | NATIVE | FORWARDED"));
        (next(), next(), next(), 0)
    };
    lines.map(split).collect()
}

#[test]
fn every_function_answers_at_the_limits_of_its_arguments_as_on_the_native_driver() {
    let api = parse(OPENCL_API).expect("the declarations");
    let generated = folder().join(format!("limits-{}.inc", std::process::id()));
    std::fs::write(&generated, cases(&api)).expect("written");
    let (source, program): (PathBuf, PathBuf) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/limits.c"), folder().join("limits"));
    compile_with(&source, &program, &[&format!("-DCASES=\"{}\"", generated.display()), "-w"]);
    let natively = answers(&program, native);
    let server = Server::start("limits", &[]);
    let forwarded = answers(&program, |program| server.program(program));
    server.end();
    let mut on_purpose = expected();
    let mut wrong = String::new();
    for (what, answer) in &natively {
        let Some(answer) = answer else {
            // The driver may die of a difference in one run and answer in another, by where memory lies.
            on_purpose.iter_mut().filter(|(case, ..)| case == what).for_each(|(.., seen)| *seen += 1);
            continue;
        };
        let other = forwarded.get(what).cloned().flatten();
        let other = other.unwrap_or_else(|| "the client died".into());
        if *answer == other {
            continue;
        }
        let known = |(case, a, b, _): &&mut (String, String, String, u32)| {
            is_like(what, case) && is_like(answer, a) && is_like(&other, b)
        };
        match on_purpose.iter_mut().find(known) {
            Some((.., seen)) => *seen += 1,
            None => writeln!(wrong, "{what} | {answer} | {other}").expect("a string"),
        }
    }
    for (what, ..) in on_purpose.iter().filter(|(.., seen)| *seen == 0) {
        writeln!(wrong, "{what}: limits.expected names a difference that isn't there").expect("a string");
    }
    let (cases, died) = (natively.len(), natively.values().filter(|a| a.is_none()).count());
    println!("{cases} cases, the native driver dies of {died}");
    assert!(wrong.is_empty(), "{} differences:\n{wrong}", wrong.lines().count());
    std::fs::remove_file(&generated).expect("removed");
}
