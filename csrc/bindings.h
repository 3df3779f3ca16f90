// Expose C++ functions as functions of a Python module. Parameters are numbers, addresses, or structures of numbers
// and addresses. Only Python's limited API is used, so one binary serves CPython 3.10 and all later versions.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace raoe::python {

// Thrown if Python has already set an error.
struct PythonError {};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

template <class T>
struct Type {};

template <class T>
T read(PyObject* value, Type<T>) {
  T result;
  if constexpr (std::is_same_v<T, bool>) {
    result = PyObject_IsTrue(value) == 1;
  } else if constexpr (std::is_floating_point_v<T>) {
    result = static_cast<T>(PyFloat_AsDouble(value));
  } else if constexpr (std::is_pointer_v<T>) {
    result = static_cast<T>(PyLong_AsVoidPtr(value));
  } else {
    result = static_cast<T>(PyLong_AsLongLong(value));
  }
  if (PyErr_Occurred()) throw PythonError();
  return result;
}

inline std::vector<std::int64_t> read(PyObject* value, Type<std::vector<std::int64_t>>) {
  const Py_ssize_t size = PyTuple_Size(value);
  if (size < 0) throw PythonError();
  std::vector<std::int64_t> items(static_cast<std::size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) items[i] = read(PyTuple_GetItem(value, i), Type<std::int64_t>());
  return items;
}

// Iterator over the arguments of a call, from left to right.
struct Values {
  PyObject* const* next;
  template <class T>
  operator T() {
    return read(*next++, Type<T>());
  }
};

struct Anything {
  template <class T>
  operator T() const;
};

// Number of Python arguments for one C++ parameter: the number of fields of a structure, otherwise 1.
template <class T, class Void, class... Parameters>
inline constexpr std::size_t fields = sizeof...(Parameters) - 1;
template <class T, class... Parameters>
inline constexpr std::size_t fields<T, std::void_t<decltype(T{Parameters{}...})>, Parameters...> =
    fields<T, void, Parameters..., Anything>;
template <class T>
constexpr std::size_t width() {
  if constexpr (std::is_aggregate_v<T>) {
    return fields<T, void>;
  } else {
    return 1;
  }
}

template <class T, std::size_t... I>
T take(Values& values, std::index_sequence<I...>) {
  if constexpr (std::is_aggregate_v<T>) {
    return T{(static_cast<void>(I), values)...};  // braces guarantee evaluation from left to right
  } else {
    return read(*values.next++, Type<T>());
  }
}

inline PyObject* to_python(std::size_t number) { return PyLong_FromSize_t(number); }
inline PyObject* to_python(const char* text) { return PyUnicode_FromString(text); }

template <auto function, class Result, class... Parameters>
PyObject* call(PyObject* const* arguments, Py_ssize_t count, Result (*)(Parameters...)) {
  constexpr std::size_t expected = (0 + ... + width<std::decay_t<Parameters>>());
  if (static_cast<std::size_t>(count) != expected) {
    const std::string text = "expected " + std::to_string(expected) + " arguments, got " + std::to_string(count);
    PyErr_SetString(PyExc_TypeError, text.c_str());
    return nullptr;
  }
  try {
    [[maybe_unused]] Values values{arguments};
    std::tuple<std::decay_t<Parameters>...> call_values{
        take<std::decay_t<Parameters>>(values, std::make_index_sequence<width<std::decay_t<Parameters>>()>())...};
    if constexpr (std::is_void_v<Result>) {
      {
        const WithoutGil without_gil;
        std::apply(function, call_values);
      }
      Py_RETURN_NONE;
    } else {
      return to_python(std::apply(function, call_values));
    }
  } catch (const PythonError&) {
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <auto function>
PyMethodDef method(const char* name) {
  PyObject* (*const called)(PyObject*, PyObject* const*, Py_ssize_t) = [](PyObject*, PyObject* const* arguments,
                                                                          Py_ssize_t count) {
    return call<function>(arguments, count, function);
  };
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called)), METH_FASTCALL, nullptr};
}

// Create the Python module of a binary. Each binary has only one: its method table is static.
template <class... Method>
PyObject* module(const char* name, Method... entries) {
  static PyMethodDef methods[] = {entries..., {}};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, name, nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}

}  // namespace raoe::python
